"""The built pages as files. `make html` first; otherwise these are skipped. test_pages_in_browser.py looks at them.

A page's weight counts, uncompressed, the page and every file that a browser fetches to show it.
"""

import re
from pathlib import Path

import pytest

from minillm.lab import notebooks, pages

HTML = notebooks.ROOT / "_build" / "html"
HEAVIEST = 2_000_000
PAGES = sorted(HTML.glob("book/*.html"))

if not notebooks.is_current():
    pytest.skip("the book is not built from these sources; run `make html`", allow_module_level=True)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def test_every_page_is_there():
    sources = notebooks.ROOT / "book"
    assert {page.stem for page in PAGES} >= {path.stem for path in [*sources.glob("*.ipynb"), *sources.glob("*.md")]}
    assert (HTML / "index.html").is_file()


@each_page
def test_a_page_loads_nothing_from_elsewhere(page):
    """B5: a control that needs two remote scripts is blank in the train."""
    remote = [url for url in pages.loaded_urls(page) if re.match(r"[a-z]+:|//", url)]
    assert not remote
    for path in pages.loaded_files(page):
        if path.suffix == ".css":
            urls = pages.STYLE_URL.findall(path.read_text(encoding="utf-8"))
            assert not [url for url in urls if re.match(r"(?!data:)[a-z]+:|//", url)], path
    text = page.read_text(encoding="utf-8")
    for script in ("require.js", "unpkg.com", "jsdelivr", "cdnjs", "thebe"):
        assert script not in text


@each_page
def test_a_page_weighs_less_than_2_mb(page):
    """B6: with everything that it loads."""
    weight = pages.page_weight(page)
    assert weight < HEAVIEST, f"{weight:,} bytes; the heaviest: {heaviest(page)}"


def heaviest(page: Path) -> list[tuple[int, str]]:
    return sorted(((path.stat().st_size, path.name) for path in pages.loaded_files(page)), reverse=True)[:5]


@each_page
def test_a_page_shows_no_error_and_no_path_of_the_machine_that_built_it(page):
    text = page.read_text(encoding="utf-8")
    assert "Traceback (most recent call last)" not in text
    assert str(notebooks.ROOT) not in text
