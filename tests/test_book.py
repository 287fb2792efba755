"""The book's sources and its machinery: table of contents, notebooks, requirements, commands, citations."""

import json
import re
import subprocess
import sys
import textwrap
import tomllib
import urllib.request
from pathlib import Path
from threading import Thread

import pytest
import yaml

from minillm.lab import notebooks, pages

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "book"
NOTEBOOKS = sorted(path for path in BOOK.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
CHAPTERS = [path for path in NOTEBOOKS if path.parent == BOOK]
PINNED = re.compile(r"(?P<name>[a-z0-9.-]+)==(?P<version>[\w.]+)(?P<marker> ; .+?)?  # (?P<why>\S.+)")
CITATION = re.compile(r"\{cite(?::[a-z]+)?\}`([^`]+)`")
DRAWS = re.compile(r"\bplt\.|\bimport matplotlib|\bstyle\.(?:figure|show|Picture)\(")


def cells(path: Path, kind: str) -> list[str]:
    loaded = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in loaded if cell["cell_type"] == kind]


def prose() -> dict[Path, str]:
    texts = {path: "\n".join(cells(path, "markdown")) for path in NOTEBOOKS}
    return texts | {path: path.read_text(encoding="utf-8") for path in BOOK.glob("*.md")}


def toc_files(node) -> list[str]:
    if isinstance(node, list):
        return [name for part in node for name in toc_files(part)]
    if not isinstance(node, dict):
        return []
    own = [node[key] for key in ("root", "file") if key in node]
    return own + [name for value in node.values() for name in toc_files(value)]


def requirements() -> list[re.Match | None]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [PINNED.fullmatch(line) for line in lines if line.strip() and not line.startswith("#")]


def test_the_table_of_contents_lists_every_page_once_and_nothing_else():
    listed = toc_files(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))
    written = [path.relative_to(ROOT).with_suffix("").as_posix() for path in [*CHAPTERS, *BOOK.glob("*.md")]]
    assert sorted(listed) == sorted(written)
    assert sorted(name for name in listed if re.search(r"/\d\d_", name)) == [
        name for name in listed if re.search(r"/\d\d_", name)
    ], "chapters are listed in their order"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_normalized(path):
    """Without outputs, counts or stray metadata, and without cells that may raise (B13)."""
    assert not notebooks.normalize([path], check=True), f"run: python -m minillm.lab.notebooks normalize {path}"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_figures_are_drawn_through_the_style_which_requires_alt_text(path):
    for source in cells(path, "code"):
        if DRAWS.search(source):
            assert re.search(r"\balt\s*=", source), f"this cell draws a figure and gives no alt text:\n{source}"
        around = re.search(r"\bplt\.show\(|\bsavefig\(|\b(?:SVG|Image)\(", source)
        assert not around, f"{around[0]} shows a picture without alt text; use minillm.lab.style"


def test_every_requirement_is_pinned_and_says_why():
    """B1: an unpinned package broke every notebook."""
    lines = requirements()
    assert all(lines), "each line reads: name==version  # why it is here"
    names = [line["name"] for line in lines]
    assert len(names) == len(set(names))
    assert (
        "==" in (ROOT / "requirements-model.txt").read_text()
        and "--hash=sha256:" in (ROOT / "requirements-model.txt").read_text()
    )


def test_torch_and_triton_are_the_pair_that_belongs_together():
    """B1 and B2: one torch, its triton, and triton only where there is a wheel of it."""
    by_name = {line["name"]: line for line in requirements()}
    assert (by_name["torch"]["version"], by_name["triton"]["version"]) == ("2.13.0", "3.7.1")
    assert by_name["torch"]["marker"] is None
    from packaging.markers import Marker

    marker = Marker(by_name["triton"]["marker"].removeprefix(" ; "))
    for system, machine, wanted in [
        ("Linux", "x86_64", True),
        ("Linux", "aarch64", True),
        ("Darwin", "arm64", False),
        ("Darwin", "x86_64", False),
        ("Windows", "AMD64", False),
    ]:
        assert marker.evaluate({"platform_system": system, "platform_machine": machine}) is wanted


def test_the_package_metadata_agrees_with_the_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {line["name"]: line["version"] for line in requirements()}
    from packaging.requirements import Requirement

    for text in project["dependencies"] + project["optional-dependencies"]["kernels"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name]), text
    assert project["requires-python"] == ">=3.11,<3.14"


def test_the_package_imports_without_jupyter_triton_or_matplotlib():
    """B2: no wheel of the kernel package on a Mac must not stop `import minillm`."""
    script = """
        import importlib, pkgutil, sys

        blocked = {"IPython", "ipykernel", "ipywidgets", "jupyter_book", "jupyterlab", "matplotlib", "nbformat",
                   "pytest", "sphinx", "transformers", "triton"}

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in blocked:
                    raise ModuleNotFoundError(f"{name} is blocked", name=name)

        sys.meta_path.insert(0, Blocker())
        import minillm

        for module in pkgutil.walk_packages(minillm.__path__, "minillm."):
            if not module.name.startswith(("minillm.lab", "minillm.kernels")):
                importlib.import_module(module.name)
        for name in minillm.__all__:
            getattr(minillm, name)
        assert not blocked & set(sys.modules), blocked & set(sys.modules)
    """
    run = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_engine_never_imports_the_lab():
    for path in (ROOT / "minillm").rglob("*.py"):
        if "lab" not in path.relative_to(ROOT).parts:
            assert not re.search(r"^\s*(from|import) minillm\.lab", path.read_text(encoding="utf-8"), re.M), path


def test_commands_of_the_readme_exist_in_the_makefile():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    commands = set(re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"book", "test"} <= commands
    assert commands <= targets


def test_every_cited_work_is_in_the_references():
    bibliography = (BOOK / "references.bib").read_text(encoding="utf-8")
    keys = re.findall(r"^@\w+\{([^,\s]+),", bibliography, re.M)
    assert len(keys) == len(set(keys))
    for path, text in prose().items():
        cited = {key.strip() for group in CITATION.findall(text) for key in group.split(",")}
        assert cited <= set(keys), f"{path.name} cites {sorted(cited - set(keys))}, which references.bib lacks"


def test_the_static_folder_holds_no_script():
    """B12: every script there would be loaded on every page."""
    assert not list((BOOK / "_static").rglob("*.js"))


def test_the_build_is_strict_and_its_pages_need_nothing_remote():
    """B10 and B5, as far as the configuration decides them."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    sphinx = config["sphinx"]["config"]
    assert config["execute"]["execute_notebooks"] == "cache" and not config["execute"].get("allow_errors")
    assert sphinx["nb_execution_raise_on_error"] is True
    assert sphinx["nb_ipywidgets_js"] == {} and ["html", "text/html", 1] in sphinx["nb_mime_priority_overrides"]
    assert "sphinx_thebe" not in sphinx["extensions"] and "sphinx-mathjax-offline" in sphinx["extensions"]
    assert not re.search(r"https?://", (BOOK / "_static" / "custom.css").read_text(encoding="utf-8"))


def test_no_leftovers_in_the_sources():
    leftover = re.compile(r"(?<![\w.])/(?:work|tmp|root|home/\w+)/|\b(?:TODO|FIXME)\b|pythonhosted|/opt/")
    for pattern in ("*.md", "*.txt", "*.toml", "*.yml", "Makefile", "book/**/*", "minillm/**/*", "tests/**/*.py"):
        for path in ROOT.glob(pattern):
            if path.suffix not in (".py", ".md", ".txt", ".toml", ".yml", ".ipynb", ".css", ".bib", ".json", ""):
                continue
            if path.is_file() and path != Path(__file__) and "__pycache__" not in path.parts:
                found = leftover.search(path.read_text(encoding="utf-8"))
                assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


# The machinery itself, on books of our own making.


def notebook(*sources: str, **cell) -> dict:
    made = [{"cell_type": "code", "metadata": {}, "source": source, "outputs": []} | cell for source in sources]
    return {"cells": made, "metadata": {"kernelspec": {"name": "mine"}}, "nbformat": 4, "nbformat_minor": 4}


def test_normalizing_removes_what_a_run_leaves_and_keeps_what_an_author_wrote():
    ran = notebook("x = 1\nx\n", "x = 1\nx\n", "y", "  ", execution_count=3, outputs=[{"output_type": "stream"}])
    ran["cells"][2] |= {"id": "mine", "metadata": {"tags": ["hide-input"], "scrolled": True, "execution": {"s": 1}}}
    ran["metadata"]["language_info"] = {"version": "3.11.7"}
    text = notebooks.normalized(ran)
    normal = json.loads(text)
    assert [cell["source"] for cell in normal["cells"]] == [["x = 1\n", "x"], ["x = 1\n", "x"], ["y"]]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in normal["cells"])
    assert normal["cells"][2]["metadata"] == {"tags": ["hide-input"]} and normal["cells"][2]["id"] == "mine"
    assert len({cell["id"] for cell in normal["cells"]}) == 3
    assert normal["metadata"] == {"kernelspec": notebooks.KERNEL}
    assert notebooks.normalized(normal) == text, "normalizing twice changes nothing"
    assert notebooks.normalized(ran) == text, "ids are made from the content"


def test_a_cell_that_may_raise_is_refused(tmp_path):
    """B13: a cell tagged raises-exception passes where nothing is raised."""
    path = tmp_path / "risky.ipynb"
    path.write_text(json.dumps(notebook("1 / 0", metadata={"tags": ["raises-exception"]})))
    with pytest.raises(ValueError, match=r"risky\.ipynb.*raises-exception"):
        notebooks.normalize([path])


def test_normalize_check_changes_nothing_and_fails(tmp_path, capsys):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook("x")))
    before = path.read_bytes()
    assert notebooks.main(["normalize", "--check", str(path)]) == 1
    assert path.read_bytes() == before and "not normalized" in capsys.readouterr().out
    assert notebooks.main(["normalize", str(path)]) == 0
    assert notebooks.main(["normalize", "--check", str(path)]) == 0


def small_book(root: Path, code: str, text: str = "# Title\n\nText.") -> Path:
    (root / "book").mkdir(parents=True)
    (root / "minillm").mkdir()
    (root / "minillm" / "module.py").write_text("VALUE = 1\n")
    (root / "requirements.txt").write_text("")
    (root / "_toc.yml").write_text("format: jb-book\nroot: book/index\nchapters:\n  - file: book/01_a\n")
    config = {"title": "t", "only_build_toc_files": True, "execute": {"execute_notebooks": "cache"}}
    (root / "_config.yml").write_text(
        json.dumps(config | {"sphinx": {"config": {"nb_execution_raise_on_error": True}}})
    )
    (root / "book" / "index.md").write_text(text)
    body = notebook(code)
    body["cells"].insert(0, {"cell_type": "markdown", "metadata": {}, "source": "# Chapter"})
    (root / "book" / "01_a.ipynb").write_text(notebooks.normalized(body))
    return root


def test_a_build_fails_when_a_notebook_fails_and_again_until_it_is_mended(tmp_path, capfd):
    """B10: after a failed build, the next one used to pass. B11: the cache did not see a change in the package."""
    root = small_book(
        tmp_path / "b", "import pathlib; exec(pathlib.Path('../minillm/module.py').read_text()); 6 / VALUE"
    )
    module = root / "minillm" / "module.py"
    module.write_text("VALUE = 0\n")
    assert notebooks.build(root) != 0 and not notebooks.is_current(root)
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert notebooks.build(root) != 0, "the second build of the same sources fails as well"
    module.write_text("VALUE = 2\n")
    assert notebooks.build(root) == 0 and notebooks.is_current(root)
    page = root / "_build" / "html" / "book" / "01_a.html"
    assert "3.0" in page.read_text() and "01_a" in capfd.readouterr().out
    assert notebooks.build(root) == 0 and "up to date" in capfd.readouterr().out
    module.write_text("VALUE = 3\n")
    assert not notebooks.is_current(root)
    assert notebooks.build(root) == 0
    assert ">2.0" in page.read_text(), "the changed package was run, not remembered"
    (root / "book" / "index.md").write_text("# Title\n\nSee [nothing](#nowhere).")
    assert notebooks.build(root) != 0, "a warning is an error"
    assert "nowhere" in capfd.readouterr().err
    (root / "book" / "index.md").write_text("# Title\n\nMended.")
    assert notebooks.build(root) == 0
    assert "kept from an earlier run" in capfd.readouterr().out, "text alone does not execute a chapter again"


def test_the_server_listens_on_this_machine_alone_and_finds_a_free_port(tmp_path):
    (tmp_path / "index.html").write_text("the book")
    with notebooks.server(tmp_path, port=0) as first:
        taken = first.server_address[1]
        with notebooks.server(tmp_path, port=taken) as second:
            assert second.server_address[0] == first.server_address[0] == "127.0.0.1"
            assert second.server_address[1] != taken
            Thread(target=second.serve_forever, daemon=True).start()
            with urllib.request.urlopen(f"http://127.0.0.1:{second.server_address[1]}/") as answer:
                assert answer.read() == b"the book"
            second.shutdown()


def test_what_a_page_loads_is_found_wherever_it_hides(tmp_path):
    """B5 and B6: the checks on built pages see a remote script, a font in a style sheet, a picture in a style."""
    page = tmp_path / "page.html"
    page.write_text(
        '<link rel="stylesheet" href="a.css?v=1"><script src="https://cdn.example/x.js"></script>'
        '<style>p{background:url(b.png)}</style><p style="background:url(\'c.png\')"><a href="https://example.org">x</a>'
        '<svg><image href="d.png"/></svg><img src="data:image/png;base64,AA=="><iframe src="//e.example/f"></iframe>'
    )
    urls = ["a.css?v=1", "https://cdn.example/x.js", "b.png", "c.png", "d.png", "//e.example/f"]
    assert pages.loaded_urls(page) == urls
    (tmp_path / "a.css").write_text("@font-face{src:url('f.ttf')}")
    sizes = {"b.png": 10, "c.png": 20, "d.png": 30, "f.ttf": 40}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    whole = sum(sizes.values()) + page.stat().st_size + (tmp_path / "a.css").stat().st_size
    assert pages.page_weight(page) == whole
    (tmp_path / "f.ttf").unlink()
    with pytest.raises(FileNotFoundError, match=r"f\.ttf through a\.css"):
        pages.loaded_files(page)
