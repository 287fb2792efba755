"""The built pages, as a reader without a network meets them. `make html` first; otherwise these are skipped.

A page's weight counts, uncompressed, the page and every file that a browser fetches to show it.
"""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from minillm.lab import notebooks, pages

HTML = notebooks.ROOT / "_build" / "html"
HEAVIEST = 2_000_000
PAGES = sorted(HTML.glob("book/*.html"))
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}

if not notebooks.is_current():
    pytest.skip("the book is not built from these sources; run `make html`", allow_module_level=True)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


class Pictures(HTMLParser):
    """Collects pictures that say nothing to who cannot see them, and the text of svg elements by the way."""

    def __init__(self):
        super().__init__()
        self.open: list[dict] = []
        self.silent: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        hidden = values.get("aria-hidden") == "true" or any(above["hidden"] for above in self.open)
        named = any((values.get(name) or "").strip() for name in ("aria-label", "aria-labelledby"))
        if tag == "img" and not hidden:
            alt = values.get("alt")
            if alt is None or re.search(r"\.(svg|png|jpe?g|webp)$", alt):
                self.silent.append(f"<img src={values.get('src')!r} alt={alt!r}>")
        if tag == "title":
            for above in self.open:
                above["named"] = True
        if tag not in VOID:
            self.open.append({"tag": tag, "hidden": hidden, "named": named, "line": self.getpos()[0]})

    def handle_endtag(self, tag):
        while self.open:
            element = self.open.pop()
            if element["tag"] == "svg" and not any(above["tag"] == "svg" for above in self.open):
                described = element["named"] or element["hidden"]
                described = described or any(above["tag"] == "svg" and above["named"] for above in self.open)
                if not described:
                    self.silent.append(f"<svg> in line {element['line']}")
            if element["tag"] == tag:
                break


def silent_pictures(text: str) -> list[str]:
    parser = Pictures()
    parser.feed(text)
    return parser.silent


def test_the_check_of_pictures_can_fail():
    assert silent_pictures('<p><img src="a.svg" alt="../_images/a.svg"></p>')
    assert silent_pictures('<img src="a.png">') and silent_pictures("<div><svg><path/></svg></div>")
    assert not silent_pictures('<img src="a.png" alt="Time grows"><svg aria-label="Time grows"><g></g></svg>')
    assert not silent_pictures('<svg><title>Time</title></svg><span aria-hidden="true"><svg></svg></span>')


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
def test_every_picture_has_words(page):
    assert not silent_pictures(page.read_text(encoding="utf-8"))


@each_page
def test_a_page_shows_no_error_and_no_path_of_the_machine_that_built_it(page):
    text = page.read_text(encoding="utf-8")
    assert "Traceback (most recent call last)" not in text
    assert str(notebooks.ROOT) not in text


@pytest.fixture(scope="module")
def browser():
    """A Chromium of this machine, driven by Playwright; the tests that need it are skipped where there is none."""
    import shutil

    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@each_page
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_the_page_without_sideways_scroll_or_white_boxes(browser, page, theme):
    """B7 and B8, at 390 px, from disk, with every request watched."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, offline=True)
    context.add_init_script(f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}')")
    tab = context.new_page()
    elsewhere, failed = [], []
    tab.on("request", lambda request: request.url.startswith(("file:", "data:")) or elsewhere.append(request.url))
    tab.on("requestfailed", lambda request: failed.append(request.url))
    tab.goto(page.as_uri(), wait_until="networkidle")
    if tab.locator("span.math, div.math").count():
        tab.wait_for_selector("mjx-container", timeout=30_000)
    width = tab.evaluate("document.documentElement.scrollWidth")
    boxes = tab.evaluate(WHITE_BOXES) if theme == "dark" else []
    context.close()
    assert not elsewhere and not failed
    assert width <= 390, f"the page is {width} px wide"
    assert not boxes


# Elements of the article that paint a bright area: the page is dark, so none should.
WHITE_BOXES = """() => [...document.querySelectorAll('.bd-article *')].filter(element => {
  const box = element.getBoundingClientRect(), [r, g, b, a = 1] =
    (getComputedStyle(element).backgroundColor.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  return box.width > 40 && box.height > 14 && a > 0.5 && Math.min(r, g, b) > 180;
}).map(element => element.outerHTML.slice(0, 120))"""
