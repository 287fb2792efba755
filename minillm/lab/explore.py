"""One function of a few parameters, shown twice: as widgets that call Python, and as a page that needs none.

`explore(draw, batch=slider([1, 2, 4]))` shows sliders in Jupyter and redraws with each move. While the
book is built the same call draws every combination once and keeps the frames in the page, with native
controls and a few lines of script. The frames of an explorer are mostly equal (axes, labels, lines that
a control does not touch), so the page stores each piece of SVG once, and a frame as a list of pieces: a
tenth of the size, with nothing to decompress and nothing that a browser opening a file would refuse.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass

import matplotlib

from minillm.lab import style
from minillm.lab.pages import BUILDING
from minillm.lab.tables import format_number

MOST_FRAMES = 200
LARGEST_HTML = 600_000  # bytes
CSS = (
    ".minillm-controls{display:grid;grid-template-columns:repeat(auto-fill,minmax(12rem,1fr));gap:.5rem 1.75rem;"
    "margin:0 auto .75rem;font-size:.9em;color:inherit}"
    ".minillm-controls[hidden]{display:none}"
    ".minillm-controls label{display:flex;flex-direction:column;gap:.15rem;max-width:22rem;margin:0}"
    ".minillm-controls .top{display:flex;justify-content:space-between;gap:1rem}"
    ".minillm-controls .top span+span{font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}"
    ".minillm-controls input{width:100%;margin:0;height:1.5rem;accent-color:var(--mini-weights);background:none}"
    ".minillm-controls select{font:inherit;color:inherit;background:var(--mini-paper);"
    "border:1px solid var(--mini-line);border-radius:.25rem;padding:.1rem .35rem;min-height:1.75rem;max-width:100%}"
    ".minillm-controls :focus-visible{outline:2px solid var(--mini-weights);outline-offset:2px}"
    ".minillm-live{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}"
    ".minillm-explorer{position:relative}"
    "@media print{.minillm-controls,.minillm-live{display:none!important}}"
)
SCRIPT = """
(function (root) {
  var data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
  var picture = root.querySelector('.minillm-scroll'), live = root.querySelector('.minillm-live');
  var form = root.querySelector('.minillm-controls'), controls = form.querySelectorAll('input,select');
  var shown = data.first;
  function update() {
    var index = 0;
    controls.forEach(function (control, i) {
      index = index * data.labels[i].length + Number(control.value);
      if (control.type !== 'range') return;
      var text = data.labels[i][control.value];
      control.setAttribute('aria-valuetext', text);
      control.parentNode.querySelector('.value').textContent = text;
    });
    if (index === shown) return;
    shown = index;
    picture.innerHTML = data.frames[index].map(function (i) { return data.parts[i]; }).join('');
    live.textContent = picture.firstChild.getAttribute('aria-label');
  }
  form.addEventListener('input', update);
  form.addEventListener('keydown', function (event) { event.stopPropagation(); });
  form.addEventListener('submit', function (event) { event.preventDefault(); });
  form.hidden = false;
  update();
})(document.currentScript.parentNode);
"""


@dataclass(frozen=True)
class Control:
    """A named set of values to choose from, as a slider or as a list. `default` is an index into `values`."""

    kind: str
    values: tuple
    labels: tuple[str, ...]
    default: int = 0
    label: str | None = None


def control(
    kind: str,
    values: Sequence | Mapping,
    label: str | None = None,
    unit: str = "",
    default=None,
    form: Callable[[object], str] | None = None,
) -> Control:
    """A "slider" or "choice" over `values`, in their order: a sequence, or a mapping of text to value.

    `label` defaults to the parameter's name, `default` to the first value; `form` writes a value as text,
    and `unit` follows it. Raises ValueError if the values have no order, are fewer than two, read the same,
    or if there is no such default.
    """
    if not isinstance(values, Collection) or isinstance(values, (str, bytes, Set)):
        raise ValueError(f"a {kind} needs a list of values or a mapping of text to value, got {values!r}")
    if isinstance(values, Mapping):
        texts, values = tuple(map(str, values)), tuple(values.values())
    else:
        values = tuple(values)
        texts = tuple((form or format_number)(v) if isinstance(v, (int, float)) or form else str(v) for v in values)
    if len(values) < 2:
        raise ValueError(f"a {kind} needs at least two values, got {values!r}")
    texts = tuple(f"{text} {unit}".strip() for text in texts)
    if len(set(texts)) < len(texts):
        raise ValueError(f"two values of the {kind} {label or ''} read the same: {', '.join(texts)}")
    if default is not None and default not in values:
        raise ValueError(f"default {default!r} is not one of the values {values!r}")
    return Control(kind, values, texts, values.index(default) if default is not None else 0, label)


def slider(values: Sequence | Mapping, **options) -> Control:
    """A slider over `values`; options (label, unit, default, form) and errors as in `control`."""
    return control("slider", values, **options)


def choice(values: Sequence | Mapping, **options) -> Control:
    """A list to choose one of `values` from; options (label, unit, default, form) and errors as in `control`."""
    return control("choice", values, **options)


def as_control(name: str, given) -> Control:
    """A control as it is; numbers become a slider, anything else a list. ValueError as in `control`."""
    if isinstance(given, Control):
        made = given
    else:
        values = given.values() if isinstance(given, Mapping) else given if isinstance(given, Collection) else ()
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
        made = control("slider" if numbers else "choice", given)
    label = made.label or name.replace("_", " ")
    return Control(made.kind, made.values, made.labels, made.default, label)


def share(frames: Sequence[str]) -> tuple[list[str], list[list[int]]]:
    """Store each piece of the frames once: (pieces, for each frame the indices of its pieces in order).

    A piece starts as one tag with the text before it. Pieces that always stand side by side are then
    joined, so that what all frames share becomes a few long pieces.
    """
    table: dict[str, int] = {}
    rows = [[table.setdefault(piece, len(table)) for piece in re.findall(r"[^>]*>", frame)] for frame in frames]
    pieces = list(table)
    after: dict[int, set] = {}
    before: dict[int, set] = {}
    for row in rows:
        for left, right in itertools.pairwise([None, *row, None]):
            after.setdefault(left, set()).add(right)
            before.setdefault(right, set()).add(left)

    def joined(left, right) -> bool:
        return len(after[left]) == 1 and len(before[right]) == 1

    short: dict[str, int] = {}
    result = []
    for row in rows:
        groups: list[list[int]] = []
        for left, right in itertools.pairwise([None, *row]):
            if left is not None and joined(left, right):
                groups[-1].append(right)
            else:
                groups.append([right])
        result.append([short.setdefault("".join(pieces[i] for i in group), len(short)) for group in groups])
    return list(short), result


class Explorer:
    """What `explore` returns; a notebook shows it as widgets, a page as HTML."""

    def __init__(self, draw: Callable, controls: Mapping[str, Control], caption: str | None = None):
        self.draw, self.controls, self.caption = draw, dict(controls), caption
        self.count = math.prod(len(c.values) for c in self.controls.values())
        if self.count > MOST_FRAMES:
            sizes = " x ".join(f"{len(c.values)} {name}" for name, c in self.controls.items())
            raise ValueError(f"{sizes} make {self.count} frames, more than {MOST_FRAMES}: offer fewer values")
        self.prefix = f"e{next(style.Picture.count)}-"
        self.first = self.picture(tuple(c.default for c in self.controls.values()))

    def picture(self, indices: Sequence[int]) -> style.Picture:
        """The frame for these indices, one for each control. Raises ValueError if its alt text says nothing."""
        values = {name: c.values[i] for (name, c), i in zip(self.controls.items(), indices, strict=True)}
        with matplotlib.rc_context(style.RC):
            drawn = self.draw(**values)
        if not (isinstance(drawn, tuple) and len(drawn) == 2):
            raise ValueError(f"the figure function must return (figure, alt text), got {type(drawn).__name__}")
        try:
            return style.Picture(*drawn, prefix=self.prefix)
        except ValueError as error:
            raise ValueError(f"frame {values}: {error}") from error

    @property
    def html(self) -> str:
        """The page's rendering: every frame while the book is built, else only the first."""
        caption = self.first.figcaption(self.caption)
        building = bool(os.environ.get(BUILDING))
        page = (
            f'<style>{style.CSS}{CSS}</style><figure class="minillm minillm-figure minillm-explorer">'
            f'{self._form() if building else ""}<div class="minillm-scroll">{self.first.svg}</div>{caption}'
            f"{self._frames() if building else ''}</figure>"
        )
        if len(page.encode()) > LARGEST_HTML:
            raise ValueError(
                f"{self.count} frames take {len(page.encode()):,} bytes of page, more than {LARGEST_HTML:,}: "
                "offer fewer values or draw fewer points"
            )
        return page

    def _form(self) -> str:
        """Native controls, hidden until the script runs."""
        parts = []
        width = self.first.width * style.SCREEN_SCALE
        for c in self.controls.values():
            label = f"<span>{html.escape(c.label)}</span>"
            if c.kind == "slider":
                now = html.escape(c.labels[c.default])
                parts.append(
                    f'<label><span class="top">{label}<span class="value" aria-hidden="true">{now}</span></span>'
                    f'<input type="range" min="0" max="{len(c.values) - 1}" step="1" value="{c.default}" '
                    f'aria-label="{html.escape(c.label)}" aria-valuetext="{now}" autocomplete="off"></label>'
                )
            else:
                options = "".join(
                    f'<option value="{i}"{" selected" if i == c.default else ""}>{html.escape(text)}</option>'
                    for i, text in enumerate(c.labels)
                )
                parts.append(f'<label>{label}<select autocomplete="off">{options}</select></label>')
        return f'<form class="minillm-controls" style="max-width:{width:.0f}px" hidden>{"".join(parts)}</form>'

    def _frames(self) -> str:
        """All frames as data, the script that shows one, and a word for readers without script."""
        ranges = [range(len(c.values)) for c in self.controls.values()]
        order = list(itertools.product(*ranges))
        start = tuple(c.default for c in self.controls.values())
        frames = [self.first.svg if at == start else self.picture(at).svg for at in order]
        parts, rows = share(frames)
        labels = [c.labels for c in self.controls.values()]
        data = {"first": order.index(start), "labels": labels, "parts": parts, "frames": rows}
        text = (
            json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/").replace("<!", "<\\u0021")
        )
        return (
            '<div class="minillm-live" aria-live="polite"></div>'
            "<noscript><p>The controls of this figure need JavaScript; it shows their first setting.</p></noscript>"
            f'<script type="application/json">{text}</script><script>{SCRIPT}</script>'
        )

    def widget(self):
        """The Jupyter rendering: an ipywidgets box whose controls call the figure function."""
        import ipywidgets

        picture = ipywidgets.HTML(self.first.html)
        boxes = []
        for c in self.controls.values():
            options = [(text, i) for i, text in enumerate(c.labels)]
            kind = ipywidgets.SelectionSlider if c.kind == "slider" else ipywidgets.Dropdown
            look = {"style": {"description_width": "initial"}, "layout": ipywidgets.Layout(min_width="20rem")}
            boxes.append(kind(options=options, value=c.default, description=c.label, **look))

        def redraw(_change) -> None:
            try:
                picture.value = self.picture([box.value for box in boxes]).html
            except Exception as error:  # a reader's own figure function may fail; an exception here would be lost
                picture.value = f"<pre>{html.escape(f'{type(error).__name__}: {error}')}</pre>"

        for box in boxes:
            box.observe(redraw, names="value")
        layout = ipywidgets.Layout(display="flex", flex_flow="row wrap")
        parts = [ipywidgets.Box(boxes, layout=layout), picture]
        if self.caption:
            parts.append(ipywidgets.HTML(f"<em>{html.escape(self.caption)}</em>"))
        return ipywidgets.VBox(parts)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        bundle = {"text/html": self.html, "text/plain": f"[{self.first.alt}]"}
        if not os.environ.get(BUILDING):
            try:
                bundle |= self.widget()._repr_mimebundle_()
            except ImportError:
                return bundle
            bundle["text/plain"] = f"[{self.first.alt}]"
        return bundle


def explore(figure_function: Callable, *, caption: str | None = None, **controls) -> Explorer:
    """Turn the parameters of `figure_function` into controls; put the call last in a cell to show it.

    `figure_function(**values)` returns (matplotlib figure, alt text that says what this frame shows).
    Each control is a `slider`, a `choice`, a sequence or a mapping of text to value. Raises ValueError
    for a function that is none, more than 200 combinations, a page of more than 600 kB, or a frame without alt text.
    """
    if not callable(figure_function):
        raise ValueError(f"explore needs a function that draws a figure, got {figure_function!r}")
    if not controls:
        raise ValueError("explore needs at least one control, such as batch=slider([1, 2, 4])")
    return Explorer(figure_function, {name: as_control(name, given) for name, given in controls.items()}, caption)
