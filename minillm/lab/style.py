"""The look of the book: one colour per concept, figures that read in light and dark and on a phone.

Every concept has one colour in all chapters, with a value for a white page and one for a dark page, held
in a CSS variable so that a single SVG serves both; a prediction is drawn in ink. The pairs were searched for
the largest differences under simulated protanopia, deuteranopia and tritanopia (Machado et al., 2009), every
one at a contrast of at least 4.5 to 1 with its page (WCAG 2.2), so that a label may wear the colour of its line.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullLocator

from minillm.lab.svg import to_svg

# concept: (on a white page, on a dark page)
PALETTE = {
    "weights": ("#105dcd", "#64b2ff"),
    "kv_cache": ("#a76612", "#e19622"),
    "activations": ("#015413", "#8de8b4"),
    "compute": ("#9f0506", "#f7a197"),
    "bandwidth": ("#057a94", "#2ed4fd"),
    "overhead": ("#55585d", "#8a858a"),
    "prefill": ("#5635a9", "#9d8af2"),
    "decode": ("#7a094a", "#f1acd6"),
}
REQUESTS = (
    ("#0b6aa8", "#6cb9f2"),
    ("#9c5a00", "#f0ae3d"),
    ("#00724f", "#3fcf9e"),
    ("#b02a6b", "#f28dbd"),
    ("#5a4fb8", "#a99cf5"),
    ("#4d5a66", "#b3bec8"),
)
PAGES = {"light": "#ffffff", "dark": "#121212"}
INK, MUTED, LINE, GRID, PAPER = "#1b1b1d", "#5b5b60", "#77777c", "#dcdce0", "#fefefe"
NEUTRALS = {  # (on a white page, on a dark page); ink is the page's own text colour
    MUTED: ("muted", "#5b5b60", "#b4b4ba"),
    LINE: ("line", "#77777c", "#8c8c92"),
    GRID: ("grid", "#dcdce0", "#37373b"),
    PAPER: ("paper", *PAGES.values()),
}
TOKENS = {
    **{light: (name.replace("_", "-"), light, dark) for name, (light, dark) in PALETTE.items()},
    **{light: (f"request-{i}", light, dark) for i, (light, dark) in enumerate(REQUESTS)},
    **NEUTRALS,
}
VARIABLES = {hex_: f"var(--mini-{name},{light})" for hex_, (name, light, _) in TOKENS.items()}
VARIABLES |= {INK: "currentColor", "#000000": "currentColor", "#ffffff": VARIABLES[PAPER]}

RC = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "figure.figsize": (5.2, 3.1),
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": LINE,
    "axes.linewidth": 0.8,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "hatch.color": PAPER,
    "axes.prop_cycle": cycler(color=[light for light, _ in PALETTE.values()]),
}
SCREEN_SCALE = 1.4  # pixels a point on a wide screen: 10 pt of text show as 14 px
NARROW_SCALE = 0.88  # pixels a point below which a figure scrolls in its box instead of shrinking on
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LARGEST_SVG = 250_000  # bytes


def variables(theme: int) -> str:
    """CSS declarations of every colour; theme 0 is light, 1 is dark."""
    return ";".join(f"--mini-{name}:{values[theme]}" for name, *values in TOKENS.values())


# `.minillm` is the root of everything that the lab shows. The book says its theme in html[data-theme],
# JupyterLab in data-jp-theme-light, VS Code in a class of body.
CSS = f"""
.minillm{{{variables(0)}}}
html[data-theme=dark] .minillm,[data-jp-theme-light=false] .minillm,.vscode-dark .minillm{{{variables(1)}}}
.text_html:has(.minillm){{background:none!important;color:inherit!important;padding:0!important}}
.minillm-figure{{margin:1rem 0;padding:0}}
.minillm-scroll{{overflow-x:auto;background:
linear-gradient(to left,var(--mini-paper) 40%,transparent) right/2.5rem 100% local no-repeat,
linear-gradient(to left,var(--mini-grid),transparent) right/.75rem 100% scroll no-repeat}}
.minillm-figure svg{{display:block;width:100%;height:auto;margin:0 auto}}
.minillm svg text{{font-family:inherit}}
.minillm svg path,.minillm svg line{{stroke-linejoin:round}}
.minillm figcaption{{margin:.4rem auto 0;font-size:.9em;line-height:1.45;color:var(--mini-muted);text-align:left}}
@media print{{html .minillm.minillm,html[data-theme=dark] .minillm.minillm{{{variables(0)};color:#000}}
.minillm-figure svg{{min-width:0!important}}.minillm-scroll{{overflow:visible;background:none}}
.minillm-figure{{break-inside:avoid}}}}
""".replace("\n", "")


def color(concept: str) -> str:
    """Colour of a concept, for matplotlib. Raises ValueError that lists the concepts."""
    if concept not in PALETTE:
        raise ValueError(f"no colour for {concept!r}; the concepts are {', '.join(PALETTE)}")
    return PALETTE[concept][0]


def request_color(index: int) -> str:
    """Colour of the request with this number; they repeat after six, so number the requests as well."""
    return REQUESTS[index % len(REQUESTS)][0]


def check_alt(alt: str | None) -> str:
    """Return the alternative text; raise ValueError unless it says what the figure shows."""
    text = " ".join((alt or "").split())
    if len(text) < 20:
        raise ValueError(f"alt text must say what the figure shows, in 20 characters or more; got {text!r}")
    if text.split()[0].lower().strip(":,.") in ("figure", "plot", "image", "picture", "graph"):
        raise ValueError(f"alt text must start with what is shown, not with {text.split()[0]!r}")
    return text


def use() -> None:
    """Make the book's style matplotlib's default in this process."""
    matplotlib.rcParams.update(RC)


class Picture:
    """A figure ready to show: inline SVG with its alternative text and caption. Notebooks display it as HTML."""

    count = itertools.count()

    def __init__(self, figure: Figure, alt: str, caption: str | None = None, prefix: str | None = None):
        self.alt, self.caption = check_alt(alt), caption
        if prefix is None:  # the count tells apart two equal figures, the digest two runs of one notebook
            digest = hashlib.sha256(self.alt.encode()).hexdigest()[:6]
            prefix = f"m{digest}{next(self.count)}-"
        self.width = figure.get_figwidth() * 72
        for axes in figure.axes:
            plain_log_ticks(axes.xaxis)
            plain_log_ticks(axes.yaxis)
        self.svg = self._labelled(to_svg(figure, prefix=prefix, colors=VARIABLES))
        if len(self.svg) > LARGEST_SVG:
            raise ValueError(
                f"the figure takes {len(self.svg):,} bytes, more than {LARGEST_SVG:,}: draw fewer points, "
                "or pass rasterized=True to the artist that holds them"
            )

    def _labelled(self, svg: str) -> str:
        size = f"max-width:{self.width * SCREEN_SCALE:.0f}px;min-width:{self.width * NARROW_SCALE:.0f}px"
        label = escape(self.alt, quote=True)
        return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" style="{size}" ', 1)

    def figcaption(self, caption: str | None) -> str:
        """The caption's element, as wide as the figure, or nothing."""
        width = f"{self.width * SCREEN_SCALE:.0f}px"
        return f'<figcaption style="max-width:{width}">{escape(caption)}</figcaption>' if caption else ""

    @property
    def html(self) -> str:
        """One `<figure>`, with the style that it needs."""
        body = f'<div class="minillm-scroll">{self.svg}</div>{self.figcaption(self.caption)}'
        return f'<style>{CSS}</style><figure class="minillm minillm-figure">{body}</figure>'

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": f"[{self.alt}]"}


def plain_log_ticks(axis) -> None:
    """Label a logarithmic axis in plain text: 0.1, 1, 10 where the numbers are short, else 10⁻¹, 10⁰, 10¹.

    Only matplotlib's own labels are replaced. They are formulas, which with the hundred small ticks between
    them take most of the time that a figure needs; a wide axis does without those ticks.
    """
    if axis.get_scale() != "log" or not isinstance(axis.get_major_formatter(), LogFormatter):
        return
    low, high = sorted(axis.get_view_interval())
    short = low >= 1e-3 and high <= 99_999

    def label(value: float, _position=None) -> str:
        exponent = round(math.log10(value))
        if short or not math.isclose(value, 10.0**exponent):
            return f"{value:,g}" if value < 1e5 else f"{value:.0e}"
        return "10" + str(exponent).translate(SUPERSCRIPT)

    def minor_label(value: float, _position=None) -> str:
        return label(value) if f"{value:e}"[0] in "25" else ""

    axis.set_major_formatter(label)
    if high / low < 30:
        axis.set_minor_formatter(minor_label)
    else:
        axis.set_minor_locator(NullLocator())


def subplots(width: float = 5.2, height: float = 3.1, rows: int = 1, columns: int = 1, **options):
    """A new (figure, axes) in the book's style; width and height in inches, text 10 points.

    Up to 5.3 inches fit a phone; wider ones scroll in their box there. `options` go to `Figure.subplots`.
    """
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns, **options)


@contextmanager
def figure(
    *, alt: str, width: float = 5.2, height: float = 3.1, caption: str | None = None, rows: int = 1, columns: int = 1,
    **options,
) -> Iterator[tuple]:  # fmt: skip
    """`with style.figure(alt="...") as (fig, ax):` draws in the book's style and shows the result at the end.

    Arguments as in `subplots`; raises ValueError as `show` does.
    """
    check_alt(alt)
    with matplotlib.rc_context(RC):
        fig, axes = subplots(width, height, rows, columns, **options)
        yield fig, axes
        show(fig, alt=alt, caption=caption)


def show(fig: Figure, *, alt: str, caption: str | None = None) -> None:
    """Display a matplotlib figure as one piece of HTML.

    `alt` says in a sentence what the figure shows, for readers who cannot see it: ValueError if it is
    missing, shorter than 20 characters, or starts with "figure" or "plot".
    """
    picture = Picture(fig, alt, caption)
    if "matplotlib.pyplot" in sys.modules:  # else the notebook would show an open pyplot figure once more
        sys.modules["matplotlib.pyplot"].close(fig)
    display(picture)


def display(thing) -> None:
    """Show in a notebook; without IPython, print the plain text."""
    try:
        from IPython.display import display as show_in_notebook
    except ImportError:
        print(thing._repr_mimebundle_()["text/plain"])
    else:
        show_in_notebook(thing)


def label_line(line, text: str, *, offset: float = 4) -> None:
    """Write `text` at the right end of a line, in its colour; `offset` in points."""
    x, y = line.get_xdata()[-1], line.get_ydata()[-1]
    line.axes.annotate(
        text, (x, y), xytext=(offset, 0), textcoords="offset points", va="center", color=line.get_color(),
        fontsize=9, annotation_clip=False,
    )  # fmt: skip
