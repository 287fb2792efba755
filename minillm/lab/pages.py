"""The book's built pages as files: make them light, and list and weigh what each of them loads.

The theme draws its dozen icons with 1.5 MB of script. It also ships the icons as a font with a style
sheet, so we drop the script and cut font and style sheet down to the icons in use. MathJax comes as one
bundle of 1.2 MB, a third of it a menu; we load its parts instead, and only on pages with formulas. The index of all
words is for the search page alone, and of the style sheet for cards and drop-downs we keep what some page uses.
"""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

BUILDING = "MINILLM_BUILDING_BOOK"  # set while the book is built, so that an explorer knows to draw its frames

ICON_SCRIPT = re.compile(r'\s*<script[^>]*\bsrc="[^"]*scripts/fontawesome\.js[^"]*"[^>]*></script>')
SEARCH_SCRIPT = re.compile(
    r'\s*<script[^>]*\bsrc="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*"[^>]*></script>'
)
MATH_SCRIPT = re.compile(r'(<script[^>]*\bsrc="[^"]*mathjax/)tex-chtml\.js("[^>]*></script>)')
FORMULA = re.compile(r'class="[^"]*\bmath\b')
ICON_RULE = re.compile(r'((?:\.fa-[a-z0-9-]+:before,?)+)\{content:"[^"]*"\}')
ICON_ESCAPE = re.compile(r'"\\([ef][0-9a-f]{3})"')  # icons sit in Unicode's private use area,
ICON = re.compile("[\ue000-\uf8ff]")  # written as an escape or as such
ICON_FONT = re.compile(r'url\(([^)]*/webfonts/[\w-]+)\.woff2\) format\("woff2"\),url\(\1\.ttf\) format\("truetype"\)')
DESIGN_NAME = re.compile(r"\bsd-[\w-]+")
DESIGN_RULE = re.compile(r"([^{}]*\.sd-[^{}]*)\{[^{}]*\}")
ICON_NAME = re.compile(r"\bfa-[a-z0-9-]+")
STYLE_URL = re.compile(r"url\(\s*['\"]?([^'\")]+)['\"]?\s*\)")
LOADING_TAGS = ("script", "img", "iframe", "audio", "video", "source", "embed", "input", "track")
UNUSED = (
    "**/*.map",
    "scripts/fontawesome.js",
    "vendor/**/*.woff2",
    "mathjax/*-*.js",
    "mathjax/sre",
    "mathjax/a11y/sre.js",
)
# MathJax asks for these once it runs: its parts (`loader.load` in _config.yml) and the fonts of plain formulas.
MATHJAX_PARTS = ("core.js", "input/tex.js", "output/chtml.js", "output/chtml/fonts/tex.js", "a11y/assistive-mml.js")
MATHJAX_FONTS = ("Main-Regular", "Math-Italic", "Main-Bold", "Size1-Regular", "Size2-Regular", "Zero", "AMS-Regular")


def lighten(html: Path) -> None:
    """Remove from the built pages in the folder `html` what they load and do not need."""
    static = html / "_static"
    used: set[str] = set()
    for path in html.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        used.update(ICON_NAME.findall(text), DESIGN_NAME.findall(text))
        if path.name != "search.html":
            text = SEARCH_SCRIPT.sub("", text)
        text = MATH_SCRIPT.sub(r"\1startup.js\2" if FORMULA.search(text) else "", ICON_SCRIPT.sub("", text))
        path.write_text(text, encoding="utf-8")
    for path in static.rglob("*.js"):
        if path.name != "fontawesome.js":
            text = path.read_text(encoding="utf-8")
            used.update(ICON_NAME.findall(text), DESIGN_NAME.findall(text))
    for style in (static / "styles").glob("*.css"):
        _keep_icons(style, used)
    for style in static.glob("sphinx-design*.css"):
        _keep_rules(style, used)
    for leftover in [path for pattern in UNUSED for path in static.glob(pattern)]:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _keep_rules(style: Path, used: set[str]) -> None:
    """Cut sphinx-design's style sheet down to the rules for classes `used`."""

    def kept(rule: re.Match) -> str:
        selectors = [each for each in rule[1].split(",") if used.issuperset(DESIGN_NAME.findall(each))]
        return rule[0].replace(rule[1], ",".join(selectors), 1) if selectors else ""

    style.write_text(DESIGN_RULE.sub(kept, style.read_text(encoding="utf-8")), encoding="utf-8")


def _keep_icons(style: Path, used: set[str]) -> None:
    """Cut the icons' rules and fonts down to the icons `used` and those that the style sheet itself shows."""
    text = style.read_text(encoding="utf-8")
    text = ICON_RULE.sub(lambda rule: rule[0] if used.intersection(ICON_NAME.findall(rule[1])) else "", text)
    points = {int(escape, 16) for escape in ICON_ESCAPE.findall(text)} | {ord(icon) for icon in ICON.findall(text)}
    for font in {(style.parent / f"{match[1]}.ttf").resolve() for match in ICON_FONT.finditer(text)}:
        _keep_glyphs(font, points)
    style.write_text(ICON_FONT.sub(r'url(\1.ttf) format("truetype")', text), encoding="utf-8")


def _keep_glyphs(font: Path, points: set[int]) -> None:
    from fontTools import subset

    options = subset.Options(drop_tables=["GSUB", "GPOS", "GDEF"], notdef_outline=True)
    with subset.load_font(str(font), options) as loaded:
        cutter = subset.Subsetter(options)
        cutter.populate(unicodes=points)
        cutter.subset(loaded)
        subset.save_font(loaded, str(font), options)


class _Loads(HTMLParser):
    """Collects what a browser fetches to show a page: scripts, style sheets, images, fonts, frames, media."""

    def __init__(self):
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        loading_link = tag == "link" and set((values.get("rel") or "").split()) & {"stylesheet", "icon", "preload"}
        if loading_link and values.get("href"):
            self.urls.append(values["href"])
        if tag in LOADING_TAGS and values.get("src"):
            self.urls.append(values["src"])
        if tag == "object" and values.get("data"):
            self.urls.append(values["data"])
        if tag in ("image", "use", "feimage"):
            self.urls += [values[name] for name in ("href", "xlink:href") if values.get(name)]
        self.urls += STYLE_URL.findall(values.get("style") or "")

    def handle_data(self, data):
        if self.cdata_elem == "style":
            self.urls += STYLE_URL.findall(data)


def loaded_urls(page: Path) -> list[str]:
    """URLs that a built page loads by itself, as written in it; links for the reader to follow are not among them."""
    parser = _Loads()
    parser.feed(page.read_text(encoding="utf-8"))
    return [url for url in parser.urls if not url.startswith(("#", "data:"))]


def loaded_files(page: Path) -> set[Path]:
    """The page and every local file that showing it loads: style sheets with their images and fonts, scripts, MathJax.

    Raises FileNotFoundError that names the page and the missing file.
    """
    waiting = [(page, url) for url in loaded_urls(page)]
    files = {page.resolve()}
    while waiting:
        source, url = waiting.pop()
        parts = urlsplit(url)
        if parts.scheme or parts.netloc or not parts.path:
            continue
        path = (source.parent / unquote(parts.path)).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"{page} loads {url} through {source.name}, and there is no such file")
        if path in files:
            continue
        files.add(path)
        if path.suffix == ".css":
            inside = STYLE_URL.findall(path.read_text(encoding="utf-8"))
            waiting += [(path, inner) for inner in inside if not inner.startswith(("#", "data:"))]
        if path.parent.name == "mathjax":
            files.update(path.parent / part for part in MATHJAX_PARTS)
            files.update(path.parent / f"output/chtml/fonts/woff-v2/MathJax_{font}.woff" for font in MATHJAX_FONTS)
    return files


def page_weight(page: Path) -> int:
    """Bytes, uncompressed, of all files that showing the page loads."""
    return sum(path.stat().st_size for path in loaded_files(page))
