"""From matplotlib's SVG file to a fragment that can live inside a page.

Three things stand between the two. Ids must be unique, or two figures on a page clip each other.
Colours must be CSS variables, or a figure drawn for a white page is unreadable on a dark one. And
text must stay text, in the page's own font, so that it can be read, found and scaled.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

import matplotlib
from matplotlib.figure import Figure

NUMBER = re.compile(r"-?\d+\.\d{3,}")
GEOMETRY = re.compile(r'\b(d|x|y|x1|x2|y1|y2|width|height|transform|points|viewBox)="([^"]*)"')
FONT = re.compile(r"font-family: ('DejaVu Sans'[^;\"]*)(; )?")
REFERENCE = re.compile(r'(?:href="#|url\(#)([^")]+)')
HEX = re.compile(r"#[0-9a-f]{6}\b")
SPANS = re.compile(r'(?:<tspan x="(-?[\d.]+)" y="(-?[\d.]+)" style="([^"]*)">([^<]*)</tspan>)')


def to_svg(figure: Figure, *, prefix: str, colors: Mapping[str, str]) -> str:
    """The figure as one `<svg>` element, deterministic, without a background.

    `prefix` starts every id, so it must differ between the figures of a page. `colors` maps a lower-case
    hex colour to what takes its place, such as "var(--mini-weights,#105dcd)".
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minillm", "savefig.dpi": 150}):
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>", r'<svg viewBox="\1" fill="currentColor">', svg)
    svg = svg.replace("xlink:href", "href")
    svg = GEOMETRY.sub(lambda match: f'{match[1]}="{shorten(match[2])}"', svg)
    svg = re.sub(r">\s*\n\s*<", "><", svg)  # a single space is a word's end in a formula
    svg = flow_math(svg)
    svg = FONT.sub("", svg)
    svg = HEX.sub(lambda match: colors.get(match[0], match[0]), svg)
    svg = own_ids(svg, prefix)
    svg = re.sub(r"<defs\s*/>|<defs>\s*</defs>", "", svg)
    return re.sub(r' style="\s*"', "", re.sub(r'(;|") +', r"\1 ", svg)).strip()


def shorten(geometry: str) -> str:
    """Coordinates to two decimals (a fiftieth of a pixel on screen), white space to single spaces."""
    rounded = NUMBER.sub(lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), geometry)
    return re.sub(r"\s+", " ", rounded).strip().replace("-0 ", "0 ")


def own_ids(svg: str, prefix: str) -> str:
    """Drop the ids that nothing refers to and put `prefix` before the others."""
    used = set(REFERENCE.findall(svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: f' id="{prefix}{match[1]}"' if match[1] in used else "", svg)
    svg = REFERENCE.sub(lambda match: match[0].replace(match[1], prefix + match[1]), svg)
    return flatten_groups(svg)


def flatten_groups(svg: str) -> str:
    """Take away groups that carry no attribute: matplotlib nests every line in two of them."""
    kept: list[bool] = []

    def visit(match: re.Match) -> str:
        if match[0] == "</g>":
            return "</g>" if kept.pop() else ""
        kept.append(match[0] != "<g>")
        return match[0] if kept[-1] else ""

    return re.sub(r"<g>|<g [^>]*>|</g>", visit, svg)


def flow_math(svg: str) -> str:
    """Let the characters of a formula flow in the page's font.

    matplotlib places each character by the widths of its own font, which leaves gaps in any other. A
    formula on one line needs only the first x and the changes of height; one that goes back (a fraction)
    keeps its places.
    """

    def rewrite(match: re.Match) -> str:
        spans = SPANS.findall(match[1])
        places = [float(x) for x, _, _, _ in spans]
        if not spans or places != sorted(places):
            return match[0]
        runs: list[list[str]] = []
        for x, y, style, text in spans:
            if runs and runs[-1][1:3] == [y, style]:
                runs[-1][3] += text
            else:
                runs.append([x, y, style, text])
        height, parts = 0.0, []
        for index, (x, y, style, text) in enumerate(runs):
            place = f'x="{x}" y="{y}"' if index == 0 else f'dy="{float(y) - height:.2f}"'
            parts.append(f'<tspan {place} style="{style}">{text}</tspan>')
            height = float(y)
        return f'<text xml:space="preserve">{"".join(parts)}</text>'

    return re.sub(r"<text>((?:<tspan[^>]*>[^<]*</tspan>)+)</text>", rewrite, svg)
