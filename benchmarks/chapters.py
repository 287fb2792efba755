"""What the chapters measure, recorded on this machine: every row of their tables that has a key.

    python -m benchmarks.chapters --json book/measurements/FILE.json    # all chapters: some minutes
    python -m benchmarks.chapters 02 05                                 # print what two of them find

The cells of a chapter run from top to bottom, as they do in Jupyter, and nothing of them is shown but the rows. From
then on the recorded figures stand in the chapters' tables, beside what the reader's own machine measures.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import linecache
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import matplotlib

from benchmarks import record
from minillm import lab
from minillm.lab.tables import TIME_UNITS, Row, Table, as_row, with_unit

BOOK = Path(__file__).resolve().parents[1] / "book"


def code(notebook: Path) -> Iterator[tuple[str, str]]:
    """(name, source) of every code cell, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            yield f"<{notebook.stem}, cell {number}>", "".join(cell["source"])


def run(notebook: Path) -> list[Row]:
    """Run a chapter; the rows with a key and a measured value, in the order of their tables."""
    rows: list[Row] = []

    def keep(given: Sequence, caption: str | None = None) -> Table:
        rows.extend(row if isinstance(row, Row) else as_row(row) for row in given)
        return Table([], ["quantity"], caption)

    chapter = types.ModuleType(f"chapter_{notebook.stem}")
    sys.modules[chapter.__name__] = chapter  # dataclasses look their module up
    matplotlib.use("agg")
    with mock.patch.object(lab, "predicted_vs_measured", keep), contextlib.redirect_stdout(io.StringIO()):
        for name, source in code(notebook):
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
            exec(compile(source, name, "exec"), chapter.__dict__)
    return [row for row in rows if row.key and row.value is not None]


def values(rows: Sequence[Row]) -> dict[str, dict]:
    """The figures under the keys of a file in `book/measurements`. Raises ValueError for a key that is there twice."""
    found: dict[str, dict] = {}
    for row in rows:
        if row.key in found:
            raise ValueError(f"two rows have the key {row.key!r}; the second is {row.quantity!r}")
        found[row.key] = {"value": row.value, "unit": row.unit}
        if isinstance(row.measured, lab.timing.Timing):
            scale = TIME_UNITS[row.unit]
            found[row.key] |= {"low": row.measured.low / scale, "high": row.measured.high / scale}
    return found


def main(arguments: list[str] | None = None) -> dict[str, dict]:
    """Run the chapters that are asked for, print their rows; returns the recorded values."""
    chapters = {path.stem[:2]: path for path in sorted(BOOK.glob("[0-9][0-9]_*.ipynb"))}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chapters", description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help=f"numbers, of {' '.join(chapters)}; all unless given")
    parser.add_argument("--json", type=record.output_file, help="write the figures as a file of book/measurements")
    asked = parser.parse_args(arguments)
    if unknown := [number for number in asked.chapters if number not in chapters]:
        parser.error(f"there is no chapter {unknown[0]!r}: there are {', '.join(chapters)}")
    rows: list[Row] = []
    for number in dict.fromkeys(asked.chapters or chapters):
        found = run(chapters[number])
        rows += found
        for row in found:
            print(f"{number}  {row.key}: {with_unit(row.value, row.unit)}", flush=True)
    if asked.json:
        words = sys.argv[1:] if arguments is None else arguments
        record.write(asked.json, ["benchmarks.chapters", *words], values(rows))
    return values(rows)


if __name__ == "__main__":
    main()
