"""The exercises: made from the solutions, failing while unanswered, passed by right answers and by no wrong one.

Each chapter's answers are in `test_exercises_chNN.py`, under the same names: CHAPTER, its notebook; BUILT, the check
of each cell that builds something; WRONG_BUILT, slips in the solution of a cell, and what the reader is told; RIGHT,
the right answers to each other check; WRONG_NUMBERS, one of them wrong, and what the reader is told; MISTAKES, the
cases of a check and the mistakes that it knows. And where a chapter has them: OTHER_WAYS, other right answers to a
cell; SKIPPED_RUNS, cells that are left to nbmake; NAMESPACE, what those would have left behind.
"""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
from solutions import BOOK, answered, code, prose

from minillm.lab import exercises, notebooks
from minillm.lab.answers import build
from minillm.lab.checks import CheckFailed, Draw, NotAnswered

FILES = sorted(Path(__file__).parent.glob("test_exercises_ch*.py"))
CHAPTERS = {path.stem.removeprefix("test_exercises_"): importlib.import_module(path.stem) for path in FILES}
DRAWS = 10  # a check draws fresh inputs: what holds must hold each time


def each(rows):
    """One case for each row that `rows` takes from a chapter: values, the words of its name last."""
    return [
        pytest.param(chapter, *values, id=re.sub(r"\W+", "-", f"{number} {words}", flags=re.ASCII)[:60].strip("-"))
        for number, chapter in CHAPTERS.items()
        for *values, words in rows(chapter)
    ]


def checks_of(chapter):
    """Each check, and its name."""
    return [(check, check.__name__) for check in (*chapter.BUILT.values(), *chapter.RIGHT)]


chapters = pytest.mark.parametrize("chapter", each(lambda chapter: [("",)]))
built = pytest.mark.parametrize(("chapter", "cell"), each(lambda chapter: [(cell, cell) for cell in chapter.BUILT]))


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The tool.


def notebook(*sources: str, kind: str = "code") -> dict:
    made = [{"cell_type": kind, "id": f"c{i}", "metadata": {}, "source": text} for i, text in enumerate(sources)]
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


SOLVED = (
    "def f(x):\n    y = x\n    ### BEGIN SOLUTION\n    if y:\n        y += 1\n    return y\n    ### END SOLUTION\nf(1)"
)


def test_answers_are_blanked_at_their_own_indentation():
    two = "a = (\n    ### BEGIN SOLUTION\n    1\n    ### END SOLUTION\n)\n### BEGIN SOLUTION\nb = 2\n### END SOLUTION"
    assert exercises.without_answers(SOLVED) == "def f(x):\n    y = x\n    ...  # your answer\nf(1)"
    assert exercises.without_answers(two) == "a = ...  # your answer\n...  # your answer"
    call = "print(\n    ### BEGIN SOLUTION\n    1\n    ### END SOLUTION\n)"
    assert exercises.without_answers(call) == "print(\n    ...  # your answer\n)"
    assert exercises.without_answers("x = 1\n\ny = '...  # your answer'") == "x = 1\n\ny = '...  # your answer'"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("### BEGIN SOLUTION\n1", "'### BEGIN SOLUTION' has no partner"),
        ("1\n### END SOLUTION", "line 2: '### END SOLUTION' has no partner"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION", "line 2: '### BEGIN SOLUTION' has no partner"),
        ("def f():\n    ...  # your answer", "line 2: .* is an answer that is missing"),
        ("x = 1", "no answer is marked"),
    ],
)
def test_marks_that_do_not_fit_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        exercises.exercise(notebook(source))


def test_an_answer_in_the_text_is_refused():
    with pytest.raises(ValueError, match="cell 'c0': answers stand in code cells"):
        exercises.exercise(notebook("### BEGIN SOLUTION\n1\n### END SOLUTION", kind="markdown"))


def test_the_command_writes_checks_and_names_what_differs(tmp_path: Path, capsys):
    (tmp_path / "solutions").mkdir()
    source, target = tmp_path / "solutions" / "01_a.ipynb", tmp_path / "exercises" / "01_a.ipynb"
    ran = notebook("import math", SOLVED)
    ran["cells"][0] |= {"outputs": [{"output_type": "stream", "text": "x"}], "execution_count": 3}
    source.write_text(json.dumps(ran))
    assert exercises.main(["--check"], book=tmp_path) == 1 and not target.exists()
    assert "01_a.ipynb: differs" in capsys.readouterr().out
    assert exercises.main([], book=tmp_path) == 0 and exercises.main(["--check"], book=tmp_path) == 0
    made = json.loads(target.read_text())
    assert target.read_text() == notebooks.normalized(made) and "y += 1" not in target.read_text()
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in made["cells"])
    target.write_text(target.read_text().replace("import math", "import os"))
    assert exercises.main(["--check"], book=tmp_path) == 1
    (tmp_path / "exercises" / "02_b.ipynb").write_text("{}")
    assert exercises.main(["--check"], book=tmp_path) == 1 and "02_b.ipynb" in capsys.readouterr().err


# The notebooks.


def test_the_exercises_are_the_solutions_without_their_answers():
    """B9: answers are in their own folder; run `python -m minillm.lab.exercises` where this fails."""
    assert exercises.make(check=True) == []
    for made in (BOOK / "exercises").glob("*.ipynb"):
        assert (BOOK / made.name).is_file(), "an exercise has the name of its chapter"
        assert "### BEGIN" not in made.read_text(encoding="utf-8")


def test_every_notebook_has_a_module_that_tries_answers_to_it():
    made = {f"ch{path.stem[:2]}": path.stem for path in (BOOK / "exercises").glob("*.ipynb")}
    assert made == {number: chapter.CHAPTER for number, chapter in CHAPTERS.items()}


@chapters
def test_each_exercise_states_what_it_is_for_and_has_three_hints(chapter):
    name = chapter.CHAPTER
    parts = re.split(r"(?m)^## ", prose(name))[1:]
    assert 3 <= len(parts) <= 5
    assert {re.search(r"^\*(Work out|Build|Explore)\b", part, re.M)[1] for part in parts} == {
        "Work out", "Build", "Explore",
    }  # fmt: skip
    for number, part in enumerate(parts, start=1):
        assert part.startswith(f"{number}. ")
        assert re.search(r"Difficulty [123] of 3, about \d+ minutes\.", part) and "**Objective:**" in part
        assert re.findall(r"<details><summary>(.*?)</summary>\n\n", part) == ["Hint 1", "Hint 2", "Hint 3"]
        assert part.count("</details>") == 3
    answers = [key.removesuffix("-answer") for key in code("solutions", name) if key.endswith("-answer")]
    checked = [key.removesuffix("-check") for key in code("solutions", name) if key.endswith("-check")]
    assert answers == checked and len(answers) == len(parts)


@chapters
def test_an_unanswered_exercise_fails_its_check_with_a_readable_message_and_nothing_else_fails(chapter):
    """Every cell of the exercises runs, but for the checks; experiments that time things are left to nbmake."""
    namespace, unanswered = dict(getattr(chapter, "NAMESPACE", {})), []
    skipped = getattr(chapter, "SKIPPED_RUNS", set())
    cells = code("exercises", chapter.CHAPTER)
    assert skipped <= set(cells)
    for key, source in cells.items():
        if key in skipped:
            continue
        if key.endswith("-check"):
            with pytest.raises(NotAnswered, match="^not answered yet: [a-z]"):
                exec(source, namespace)
            unanswered.append(key)
        else:
            exec(source, namespace)
    assert len(unanswered) >= 3


# The checks.


@chapters
def test_there_are_at_least_three_wrong_answers_to_each_exercise(chapter):
    """And no check of the notebook is left out."""
    tried = [cell for cell, *_ in chapter.WRONG_BUILT] + [check for check, *_ in chapter.WRONG_NUMBERS]
    for exercise in (*chapter.BUILT, *chapter.RIGHT):
        assert tried.count(exercise) >= 3, exercise
    called = re.findall(r"\bcheck\.(\w+)\(", "\n".join(code("solutions", chapter.CHAPTER).values()))
    assert sorted(called) == sorted(name for _, name in checks_of(chapter))


@pytest.mark.parametrize("blank", [None, ...], ids=str)
@pytest.mark.parametrize(("chapter", "check"), each(checks_of))
def test_every_check_says_when_it_is_not_answered(chapter, check, blank):
    """Also where only one of its answers is missing."""
    right = chapter.RIGHT.get(check, ["a function"])
    for missing in (set(range(len(right))), *({place} for place in range(len(right)))):
        with pytest.raises(NotAnswered, match="^not answered yet: "):
            check(*(blank if place in missing else answer for place, answer in enumerate(right)))


@built
def test_a_function_that_returns_nothing_is_not_answered(chapter, cell):
    """Nor one that returns `...`, nor a class whose methods return nothing."""
    answer, blanks = answered(chapter.CHAPTER, cell), [lambda *_: None, lambda *_: ...]
    if isinstance(answer, type):
        blanks = [type("Blank", (), {name: blanks[0] for name, value in vars(answer).items() if callable(value)})]
    for blank in blanks:
        with pytest.raises(NotAnswered, match="^not answered yet: "):
            chapter.BUILT[cell](blank)


@built
def test_a_right_answer_passes_whatever_is_drawn(chapter, cell, capsys):
    """One line each time: the reader sees that the check ran, and on how much."""
    answer = answered(chapter.CHAPTER, cell)
    for _ in range(DRAWS):
        chapter.BUILT[cell](answer)
        assert re.fullmatch(r"✓ \w+: right on \d+ random inputs\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("chapter", "cell", "other"),
    each(lambda chapter: [(cell, way, cell) for cell, way in getattr(chapter, "OTHER_WAYS", ())]),
)
def test_another_right_answer_passes(chapter, cell, other):
    """A check must not insist on the way that the solution takes."""
    for _ in range(DRAWS):
        chapter.BUILT[cell](other)


@pytest.mark.parametrize(
    ("chapter", "cell", "edits", "message"),
    each(lambda chapter: [(*row, f"{row[0]} {row[-1]}") for row in chapter.WRONG_BUILT]),
)
def test_a_wrong_answer_fails_and_is_told_why(chapter, cell, edits, message):
    """B3: weak checks let wrong code pass. Each slip must fail, whatever is drawn, and be told what is wrong."""
    wrong = answered(chapter.CHAPTER, cell, *edits)
    for _ in range(DRAWS):
        with pytest.raises(CheckFailed, match=f"(?s){message}") as failed:
            chapter.BUILT[cell](wrong)
        assert not isinstance(failed.value, NotAnswered)
        assert "\n  on the input " in str(failed.value)


@pytest.mark.parametrize(
    ("chapter", "check"), each(lambda chapter: [(check, check.__name__) for check in chapter.RIGHT])
)
def test_the_right_numbers_pass_and_are_confirmed(chapter, check, capsys):
    check(*chapter.RIGHT[check])
    assert all(line.startswith("✓ ") for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("chapter", "check", "place", "wrong", "message"),
    each(lambda chapter: [(*row, f"{row[0].__name__} {row[-1]}") for row in chapter.WRONG_NUMBERS]),
)
def test_a_wrong_number_or_choice_fails_and_is_told_why(chapter, check, place, wrong, message):
    """B3 for what is worked out or concluded."""
    answers = list(chapter.RIGHT[check])
    answers[place] = wrong
    with pytest.raises(CheckFailed, match=f"^{message}"):
        check(*answers)


@pytest.mark.parametrize(
    ("chapter", "cases", "mistakes"),
    each(lambda chapter: [(cases, mistakes, cases.__name__) for cases, mistakes in chapter.MISTAKES]),
)
def test_a_known_mistake_never_breaks_the_check_that_looks_for_it(chapter, cases, mistakes):
    """Whatever the wrong answer is, every remark's function can be asked about every case."""
    for mistake in mistakes.values():
        for case in cases(Draw(11)):
            mistake(*case)


def test_the_first_remark_that_fits_is_given_and_none_where_none_fits():
    def doubled(x):
        return 2 * x

    mistakes = {"squared": lambda x: x * x, "squared too": lambda x: x**2}
    with pytest.raises(CheckFailed, match=r"squared\n  on the input x = 3"):
        build("doubled", lambda x: x * x, doubled, [(3,)], mistakes)
    with pytest.raises(CheckFailed) as failed:
        build("doubled", lambda x: x + 1, doubled, [(3,)], mistakes)
    assert "squared" not in str(failed.value)
