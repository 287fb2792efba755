"""What the chapters measure is recorded as it was measured, and shown beside the reader's own."""

import json

import pytest

from benchmarks import chapters
from minillm import lab
from minillm.lab import tables

SOURCE = """
from dataclasses import dataclass
from minillm import lab
here = lab.setup("draft")

@dataclass
class Measured:
    ms: float

timing = lab.timing.Timing((0.002, 0.004, 0.003))
print("not shown")
lab.predicted_vs_measured([
    lab.Row("step", 1.0, timing, "ms", key="step"),
    ("rate", 2.0, Measured(2.5).ms, "tokens/s", "rate"),
    lab.Row("no key", 1.0, 2.0),
    lab.Row("nothing measured", 1.0, None, key="absent"),
])
"""


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book with one chapter, and an empty folder of measurements."""
    cells = [{"cell_type": "markdown", "source": ["# Chapter"]}, {"cell_type": "code", "source": [SOURCE]}]
    (tmp_path / "01_small.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "book" / "measurements").mkdir(parents=True)
    monkeypatch.setattr(chapters, "BOOK", tmp_path)
    return tmp_path


def test_rows_with_a_key_are_recorded_and_then_shown(book, capsys, monkeypatch):
    file = book / "book" / "measurements" / "here.json"
    found = chapters.main(["01", "--json", str(file)])
    assert found == {
        "step": {"value": 3.0, "unit": "ms", "low": 2.5, "high": 3.5},
        "rate": {"value": 2.5, "unit": "tokens/s"},
    }
    content, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert content["values"] == found
    assert content["command"] == f"python -m benchmarks.chapters 01 --json {file}"
    assert "not shown" not in printed and "01  rate: 2.50\u00a0tokens/s" in printed

    monkeypatch.chdir(book)
    shown = lab.predicted_vs_measured([lab.Row("step", 1.0, 2.0, "ms", key="step")])._repr_mimebundle_()["text/html"]
    assert content["device"] in shown and content["date"] in shown and "2.50 to 3.50" in shown
    assert lab.predicted_vs_measured is tables.predicted_vs_measured


def test_a_chapter_that_is_named_twice_runs_once(book, capsys):
    found = chapters.main(["01", "01"])
    assert list(found) == ["step", "rate"]
    assert capsys.readouterr().out.count("01  step") == 1


def test_a_key_names_one_figure():
    row = lab.Row("a", 1.0, 2.0, key="same")
    with pytest.raises(ValueError, match="'same'.*'b'"):
        chapters.values([row, lab.Row("b", 1.0, 2.0, key="same")])


def test_an_unknown_chapter_is_refused(book, capsys):
    with pytest.raises(SystemExit):
        chapters.main(["17"])
    assert "no chapter '17': there are 01" in capsys.readouterr().err
