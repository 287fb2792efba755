"""The book's solutions and exercises as the tests read them: their cells, their text, and an answer with a slip."""

import json
import re

import torch

from minillm.lab import notebooks
from minillm.roofline import decode_step

BOOK = notebooks.ROOT / "book"


def cells(folder: str, name: str) -> list[dict]:
    loaded = json.loads((BOOK / folder / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in loaded]


def code(folder: str, name: str) -> dict[str, str]:
    return {cell["id"]: cell["source"] for cell in cells(folder, name) if cell["cell_type"] == "code"}


def prose(name: str) -> str:
    return "\n".join(cell["source"] for cell in cells("solutions", name) if cell["cell_type"] == "markdown")


def answered(chapter: str, cell: str, *edits: tuple[str, str]):
    """The function or class that a solution's answer cell defines, with some of its text replaced."""
    source = code("solutions", chapter)[f"{cell}-answer"]
    for old, new in edits:
        assert old in source, f"the solution of {cell} no longer contains {old!r}"
        source = source.replace(old, new)
    namespace = {"torch": torch, "decode_step": decode_step}
    exec(source, namespace)
    return namespace[re.search(r"^(?:def|class) (\w+)", source, re.M)[1]]
