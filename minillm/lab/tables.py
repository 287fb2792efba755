"""Small tables of results, above all: what we predicted beside what we measured.

A row may also show the figures recorded on other devices (`book/measurements/*.json`) and the one that a
paper reports. Each kind is labelled, and where nothing was measured the cell says so.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from minillm.lab import style
from minillm.lab.timing import UNITS, Timing

TIME_UNITS = {name: scale for scale, name in UNITS} | {"us": 1e-6}
LONG = ' class="long"'
NOT_RECORDED, NOT_MEASURED = "not recorded yet", "not measured"
CSS = (
    ".minillm-table{margin:1rem 0;padding:0}"
    ".minillm-table table{border-collapse:collapse;margin:0;width:auto;font-size:.9em;line-height:1.4;"
    "color:inherit;background:none;border:0}"
    ".minillm-table th,.minillm-table td{padding:.35rem .6rem;border:0;border-bottom:1px solid var(--mini-grid);"
    "text-align:right;vertical-align:top;font-variant-numeric:tabular-nums;color:inherit;background:none}"
    ".minillm-table :is(th,td) b{font-weight:inherit;white-space:nowrap}"
    ".minillm-table thead b{white-space:normal}"
    ".minillm-table tbody b.long{display:inline-block;white-space:normal;min-width:9em;max-width:22em}"
    ".minillm-table thead th{border-bottom:2px solid var(--mini-line);font-weight:600;vertical-align:bottom}"
    ".minillm-table tbody th,.minillm-table th.first{text-align:left}"
    ".minillm-table tbody th{font-weight:400}"
    ".minillm-table tr,.minillm-table tr:nth-child(even),.minillm-table tr:hover{background:none!important}"
    ".minillm-table small{display:block;color:var(--mini-muted);font-size:.85em;font-weight:400;width:max-content;"
    "max-width:9em;margin-left:auto}"
    ".minillm-table thead small{max-width:7em}"
    ".minillm-table :is(tbody th,th.first) small{max-width:22em;margin-left:0}"
    "@media (max-width:600px){.minillm-table table{font-size:.85em}.minillm-table :is(th,td){padding:.3rem .4rem}"
    # the names stay in sight while the figures scroll
    ".minillm-table :is(tbody th,th.first){position:sticky;left:0;z-index:1;min-width:6.5em;"
    "background:var(--mini-paper)}"
    ".minillm-table :is(tbody th,th.first) :is(b,b.long,small){white-space:normal;min-width:0;max-width:8.5em}}"
)


def format_number(value: float | int | str | None) -> str:
    """Three significant digits, thousands apart by commas; text as it is."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        try:
            value = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"expected a number or a text, got {value!r}") from None
    if not math.isfinite(value):
        return str(value)
    if value == 0 or (isinstance(value, int) and abs(value) < 1e12):
        return f"{int(value):,}"
    exponent = math.floor(math.log10(abs(float(f"{value:.2e}"))))
    if -4 <= exponent < 12:
        return f"{value:,.{max(0, 2 - exponent)}f}"
    return f"{value:.2e}"


def listed(what: str, given) -> list:
    """What was given, as a list; ValueError where it is a text, a mapping or nothing to go through."""
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"{what} should be a list or a tuple, got {given!r}")
    return list(given)


class Table:
    """Rows of cells under column heads; a cell is a text, a number, or (text, small print below it)."""

    def __init__(self, rows: Sequence[Sequence], columns: Sequence[str], caption: str | None = None):
        rows, columns = [listed("a row", row) for row in listed("rows", rows)], listed("columns", columns)
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"a row of {len(row)} cells under {len(columns)} columns: {tuple(row)!r}")
        self.rows = [[cell if isinstance(cell, tuple) else (format_number(cell), "") for cell in row] for row in rows]
        self.columns = [column if isinstance(column, tuple) else (column, "") for column in columns]
        self.caption = caption

    @property
    def html(self) -> str:
        """An HTML table that scrolls in its own box where the page is narrow."""

        def cell(tag: str, content: tuple[str, str], attributes: str = "") -> str:
            text, small = (escape(part) for part in content)
            below = f"<small>{small}</small>" if small else ""
            return f"<{tag}{attributes}><b{LONG if len(text) > 18 else ''}>{text}</b>{below}</{tag}>"

        first = ' scope="col" class="first"'
        head = "".join(cell("th", c, first if not i else ' scope="col"') for i, c in enumerate(self.columns))
        body = "".join(
            "<tr>" + cell("th", row[0], ' scope="row"') + "".join(cell("td", c) for c in row[1:]) + "</tr>"
            for row in self.rows
        )
        caption = f"<figcaption>{escape(self.caption)}</figcaption>" if self.caption else ""
        label = escape(self.caption or "Table of results", quote=True)
        return (
            f'<style>{style.CSS}{CSS}</style><figure class="minillm minillm-table">'
            f'<div class="minillm-scroll" role="region" tabindex="0" aria-label="{label}">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{caption}</figure>"
        )

    def __str__(self) -> str:
        cells = [[f"{a} ({b})" if b else a for a, b in row] for row in [self.columns, *self.rows]]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        lines.insert(1, "  ".join("-" * w for w in widths))
        return "\n".join(lines + ([self.caption] if self.caption else []))

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": str(self)}


def table(rows: Sequence[Sequence], columns: Sequence[str], caption: str | None = None) -> Table:
    """A small table; put it last in a cell to show it. Raises ValueError if a row does not fit the columns."""
    return Table(rows, columns, caption)


@dataclass(frozen=True)
class Row:
    """One quantity: predicted, measured here, and what else is known of it.

    `measured` is a number in `unit`, a `Timing` (then `unit` is one of time), or None. `key` names the value in the
    files of `book/measurements`, and with it the model, where another device would time another one. `paper` is the
    reported figure, in `unit`, and `citation` says whose it is and under which conditions.
    """

    quantity: str
    predicted: float | None
    measured: float | Timing | None
    unit: str = ""
    key: str | None = None
    paper: float | str | None = None
    citation: str | None = None

    def __post_init__(self):
        if isinstance(self.measured, Timing) and self.unit not in TIME_UNITS:
            raise ValueError(f"{self.quantity}: a Timing needs a unit of time, got {self.unit!r}")
        if self.paper is not None and not self.citation:
            raise ValueError(f"{self.quantity}: a figure from a paper needs its citation and conditions")

    @property
    def value(self) -> float | None:
        """Measured value in `unit`; the median of a `Timing`."""
        if isinstance(self.measured, Timing):
            return self.measured.median / TIME_UNITS[self.unit]
        return self.measured

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, where there are both."""
        return self.value / self.predicted if self.value is not None and self.predicted else None


def with_unit(value: float | str | None, unit: str) -> str:
    """ "12.3 ms", with the unit after a hard space; "1.5×" and "20%" without one."""
    text = format_number(value)
    space = "" if unit in ("×", "%") else "\u00a0"
    return f"{text}{space}{unit}" if unit and text and not isinstance(value, str) else text


def predicted_vs_measured(rows: Sequence[Row | Sequence], caption: str | None = None) -> Table:
    """A table of predicted beside measured, with their ratio, measured over predicted.

    A row is a `Row` or a tuple of its fields: (quantity, predicted, measured, unit, key, paper, citation),
    the last four optional. Rows with a `key` add a column per recorded device ("not recorded yet" where
    there is none), rows with a `paper` add a column for it.
    """
    rows = [row if isinstance(row, Row) else as_row(row) for row in listed("rows", rows)]
    if not rows:
        raise ValueError("predicted_vs_measured needs at least one row")
    entries = {row.key: recorded(row.key) for row in rows if row.key}
    devices = list(dict.fromkeys((e["device"], e["date"]) for found in entries.values() for e in found))
    recorded_columns = [(f"recorded: {device}", date) for device, date in devices] or [("recorded elsewhere", "")]
    columns: list = ["quantity", "predicted", "measured here", ("ratio", "to prediction")]
    columns += recorded_columns if entries else []
    columns += ["paper"] if any(row.paper is not None for row in rows) else []
    cells = []
    for row in rows:
        line = [row.quantity, with_unit(row.predicted, row.unit), measured_cell(row)]
        line.append("" if row.ratio is None else f"{format_number(row.ratio)}×")
        if entries:
            line += [recorded_cell(row, entries, device) for device in devices or [None]]
        if columns[-1] == "paper":
            line.append("" if row.paper is None else (with_unit(row.paper, row.unit), row.citation))
        cells.append(line)
    return Table(cells, columns, caption)


def as_row(given) -> Row:
    """A `Row` from a tuple of its fields; ValueError where they are too few or too many."""
    fields = listed("a row", given)
    if not 3 <= len(fields) <= 7:
        raise ValueError(f"a row has 3 to 7 fields, from quantity, predicted, measured on; got {given!r}")
    return Row(*fields)


def measured_cell(row: Row):
    """The measured value, with the spread below it when it is a `Timing`."""
    if row.value is None:
        return NOT_MEASURED
    text = with_unit(row.value, row.unit)
    if isinstance(row.measured, Timing):
        low, high = (format_number(x / TIME_UNITS[row.unit]) for x in (row.measured.low, row.measured.high))
        return text, f"{low} to {high}"
    return text


def recorded_cell(row: Row, entries: dict[str, list[dict]], device: tuple[str, str] | None):
    """What this device recorded for the row's key, if anything."""
    if row.key is None:
        return ""
    for entry in entries[row.key]:
        if (entry["device"], entry["date"]) == device:
            text = with_unit(entry["value"], entry.get("unit", row.unit))
            if entry.get("low") is not None and entry.get("high") is not None:
                return text, f"{format_number(entry['low'])} to {format_number(entry['high'])}"
            return text
    return NOT_RECORDED


def measurements_folder() -> Path | None:
    """`book/measurements`, looked for upwards from the current folder and from the package; None if absent."""
    for start in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if (folder / "book" / "measurements").is_dir():
                return folder / "book" / "measurements"
    return None


@functools.cache
def read_measurements(folder: Path) -> tuple[dict, ...]:
    """Every recorded file of a folder, in the order of their names; ValueError naming a file that is not one."""
    files = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path.name} is not valid JSON: {error}") from error
        parts = content if isinstance(content, dict) else {}
        missing = [k for k in ("device", "date", "command", "values") if k not in parts]
        if missing:
            raise ValueError(f"{path.name} lacks {', '.join(missing)}")
        values = parts["values"].values() if isinstance(parts["values"], dict) else [None]
        if not all(isinstance(value, dict) and "value" in value for value in values):
            raise ValueError(f'{path.name}: "values" must hold {{"value": number}} under each key')
        files.append(content)
    return tuple(files)


def recorded(key: str, folder: Path | None = None) -> list[dict]:
    """Figures recorded under `key` on real devices: {"value", "unit", "low", "high", "device", "date", "command"}.

    Empty where nothing was recorded, or where the book's folder is not at hand.
    """
    folder = folder or measurements_folder()
    files = read_measurements(folder) if folder else ()
    origin = ("device", "date", "command")
    return [{**f["values"][key], **{k: f[k] for k in origin}} for f in files if key in f["values"]]
