"""The exercises, made from their solutions.

    python -m minillm.lab.exercises [--check]

Only the solved notebooks in `book/solutions/` are written by hand. In their code cells, what stands between
`### BEGIN SOLUTION` and `### END SOLUTION` is the answer; `book/exercises/` holds the same notebooks with
`...  # your answer` in its place. Text is copied as it is, so no answer may stand in it.
Making the exercises overwrites them, answers that a reader wrote there included.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from minillm.lab.notebooks import ROOT, normalized

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
BLANK = "...  # your answer"
ALONE = re.compile(rf"= \(\n *{re.escape(BLANK)}\n *\)$", re.M)  # brackets that only a longer answer needs


def without_answers(source: str) -> str:
    """A code cell's text with each answer replaced by one blank line at the indentation of its first mark.

    Brackets around nothing but an answer go with it: `a = ...  # your answer`.
    Raises ValueError for a mark without its partner, and for a blank that stands outside the marks.
    """
    kept: list[str] = []
    inside = False
    for number, line in enumerate(source.splitlines(), start=1):
        mark = line.strip()
        if mark in (BEGIN, END):
            if inside == (mark == BEGIN):
                raise ValueError(f"line {number}: {mark!r} has no partner")
            inside = mark == BEGIN
            if inside:
                kept.append(line[: line.index(BEGIN)] + BLANK)
        elif mark == BLANK:
            raise ValueError(f"line {number}: {BLANK!r} in a solution is an answer that is missing")
        elif not inside:
            kept.append(line)
    if inside:
        raise ValueError(f"{BEGIN!r} has no partner")
    return ALONE.sub(f"= {BLANK}", "\n".join(kept))


def exercise(solution: dict) -> str:
    """The text of an exercise notebook, made from a solved one: normalized, without outputs.

    Raises ValueError that names the cell where the marks do not fit, or says that there are none.
    """
    cells, blanks = [], 0
    for cell in solution["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            try:
                source = without_answers(source)
            except ValueError as error:
                raise ValueError(f"cell {cell.get('id')!r}, {error}") from error
            blanks += source.count(BLANK)
        elif BEGIN in source or END in source:
            raise ValueError(f"cell {cell.get('id')!r}: answers stand in code cells, this one is text")
        cells.append(cell | {"source": source})
    if not blanks:
        raise ValueError(f"no answer is marked with {BEGIN!r} and {END!r}")
    return normalized(solution | {"cells": cells})


def make(book: Path = ROOT / "book", check: bool = False) -> list[Path]:
    """Write `book/exercises` from `book/solutions`, or only `check` it; returns the exercises that differed.

    Raises ValueError naming a solution that cannot be turned into an exercise, or an exercise without a solution.
    """
    solutions = sorted((book / "solutions").glob("*.ipynb"))
    folder = book / "exercises"
    orphans = {path.name for path in folder.glob("*.ipynb")} - {path.name for path in solutions}
    if orphans:
        raise ValueError(f"no solution in {book / 'solutions'} for the exercises {', '.join(sorted(orphans))}")
    differing = []
    for path in solutions:
        try:
            text = exercise(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        target = folder / path.name
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            differing.append(target)
            if not check:
                folder.mkdir(exist_ok=True)
                target.write_text(text, encoding="utf-8")
    return differing


def main(arguments: list[str] | None = None, book: Path = ROOT / "book") -> int:
    """The command line described at the top of this file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m minillm.lab.exercises", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if an exercise would change")
    options = parser.parse_args(arguments)
    try:
        differing = make(book, options.check)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for path in differing:
        print(f"{path}: {'differs from its solution without answers' if options.check else 'written'}")
    return int(options.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
