"""The exercises: made from the solutions, failing while unanswered, passed by right answers and by no wrong one."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from minillm.config import ModelConfig
from minillm.kv_cache import ContiguousCache
from minillm.lab import exercises, notebooks
from minillm.lab.answers import build, ch01, ch02, ch03
from minillm.lab.checks import CheckFailed, Draw, NotAnswered
from minillm.model import Transformer
from minillm.naive import NoCache
from minillm.roofline import decode_step
from minillm.sampling import SamplingParams, probabilities

BOOK = notebooks.ROOT / "book"
CHAPTERS = {"01_naive_generation": ch01, "02_memory_bound": ch02, "03_kv_cache": ch03}
SECONDS = {
    1: 1.0,
    2: 1.9,
    4: 2.0,
    8: 2.6,
    16: 4.16,
}  # what a machine might have measured in "Is a second request free?"


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    made = {path.stem for path in (BOOK / "exercises").glob("*.ipynb")}
    assert made >= set(CHAPTERS)
    for name in made:
        assert (BOOK / f"{name}.ipynb").is_file(), "an exercise has the name of its chapter"
        own = Path(__file__).with_name(f"test_exercises_ch{name[:2]}.py")
        assert name in CHAPTERS or own.is_file(), f"nothing tries wrong answers to {name}"
        assert "### BEGIN" not in (BOOK / "exercises" / f"{name}.ipynb").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CHAPTERS)
def test_each_exercise_states_what_it_is_for_and_has_three_hints(name):
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


@pytest.mark.parametrize("name", CHAPTERS)
def test_an_unanswered_exercise_fails_its_check_with_a_readable_message_and_nothing_else_fails(name):
    """Every cell of the exercises runs, but for the checks; experiments that time things are left to nbmake."""
    namespace, unanswered = {"seconds": SECONDS}, []
    for key, source in code("exercises", name).items():
        if key == "free-run" or key.startswith("growing-run"):
            continue
        if key.endswith("-check"):
            with pytest.raises(NotAnswered, match="^not answered yet: [a-z]"):
                exec(source, namespace)
            unanswered.append(key)
        else:
            exec(source, namespace)
    assert len(unanswered) >= 3


CHECKS = [
    (ch01.waste, 3), (ch01.latencies, 1), (ch01.ragged_attention, 1), (ch01.nucleus, 1), (ch01.doubling, 2),
    (ch02.bound, 4), (ch02.regimes, 1), (ch02.largest_batch, 1), (ch02.long_context, 2),
    (ch03.room, 4), (ch03.ragged_decode, 1), (ch03.next_turn, 1), (ch03.concatenating, 3),
]  # fmt: skip


@pytest.mark.parametrize(("check", "count"), CHECKS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("blank", [None, ...])
def test_every_check_says_when_it_is_not_answered(check, count, blank):
    with pytest.raises(NotAnswered, match="^not answered yet: "):
        check(*[blank] * count)
    with pytest.raises(NotAnswered, match="^not answered yet: last and speedup"):
        ch02.free_batch(SECONDS, 4, blank)


BUILT = [
    ("01_naive_generation", "latencies", ch01.latencies),
    ("01_naive_generation", "ragged", ch01.ragged_attention),
    ("01_naive_generation", "nucleus", ch01.nucleus),
    ("02_memory_bound", "largest", ch02.largest_batch),
    ("03_kv_cache", "ragged", ch03.ragged_decode),
    ("03_kv_cache", "turn", ch03.next_turn),
]


@pytest.mark.parametrize(("chapter", "cell", "check"), BUILT, ids=lambda value: str(value))
def test_a_right_answer_passes_whatever_is_drawn(chapter, cell, check, capsys):
    """One line each time: the reader sees that the check ran, and on how much."""
    answer = answered(chapter, cell)
    for _ in range(10):
        check(answer)
        assert re.fullmatch(r"✓ \w+: right on \d+ random inputs\n", capsys.readouterr().out)


# Other ways to be right: a check must not insist on the way that the solution takes.


def looped_attention(q, k, v, lengths):
    group, parts = q.shape[1] // k.shape[1], []
    for part in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        one, keys, values = (x.transpose(0, 1) for x in part)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        out = torch.nn.functional.scaled_dot_product_attention(one, keys, values, is_causal=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def nucleus_from_the_end(probs, top_p):
    ranked, order = probs.sort()
    result = probs.clone()
    result[order[ranked.cumsum(0) <= 1 - top_p]] = 0
    return result / result.sum()


def decode_in_a_loop(q, k, v, keys, values, lengths):
    out = []
    for s, n in enumerate(lengths):
        keys[s, :, n], values[s, :, n] = k[s], v[s]
        group = q.shape[1] // k.shape[1]
        seen_k, seen_v = (x[s, :, : n + 1].repeat_interleave(group, dim=0) for x in (keys, values))
        weights = (torch.einsum("hd,htd->ht", q[s], seen_k) / q.shape[-1] ** 0.5).softmax(-1)
        out.append(torch.einsum("ht,htd->hd", weights, seen_v))
    return torch.stack(out)


def test_other_right_answers_pass():
    for _ in range(10):
        ch01.ragged_attention(looped_attention)
        ch01.nucleus(nucleus_from_the_end)
        ch03.ragged_decode(decode_in_a_loop)


# Wrong answers: the solutions with a slip. Each must fail, whatever is drawn, and be told what is wrong.

BY_NAN = "unseen = keys[:, 0, :end, 0].isnan()"
STAYS = "result[stays] = probs[stays]"
SLIPS = [
    ("latencies", [("arrivals[0] - asked", "arrivals[0]")], "subtract `asked`"),
    ("latencies", [("if gaps else None", "if gaps else 0.0")], "TPOT is None"),
    ("latencies", [("if gaps else None", "if sum(gaps) else None")], "a gap of 0 s is a gap"),
    ("latencies", [("if gaps else None", "")], "raised ZeroDivisionError"),
    ("latencies", [("/ len(gaps) if", "/ len(arrivals) if")], "have n - 1 gaps"),
    ("latencies", [("(arrivals[-1] - arrivals[0])", "(arrivals[-1] - asked)")], "start at the first arrival"),
    (
        "latencies",
        [("(arrivals[-1] - arrivals[0]) / len(gaps)", "(arrivals[-1] - asked) / len(arrivals)")],
        "count n - 1 gaps",
    ),
    ("latencies", [('"itl": gaps', '"itl": [arrivals[0] - asked, *gaps]')], "the wait before the first is TTFT"),
    ("latencies", [('"itl": gaps', '"itl": max(gaps, default=0.0)')], "not the largest alone"),
    (
        "attention",
        [(".repeat_interleave(group, dim=1)", ".repeat(1, group, 1)")],
        "tiling the heads.*repeat_interleave",
    ),
    ("attention", [(" / q.shape[-1] ** 0.5", "")], "not scaled"),
    ("attention", [(" / q.shape[-1] ** 0.5", " / q.shape[-1]")], "square root"),
    ("attention", [(".tril()", ".tril(-1)")], "sees itself too"),
    ("attention", [(".tril()", ".tril(1)")], "one token too many"),
    ("attention", [(".tril()", "")], "causal mask is missing"),
    (
        "attention",
        [("(owner[:, None] == owner[None, :])", "torch.ones(len(q), len(q), dtype=torch.bool)")],
        "sequences see each other",
    ),
    ("attention", [(".softmax(-1)", ".softmax(-2)")], r"on the input q = .*lengths = \["),
    ("nucleus", [("before < top_p", "ranked.cumsum(0) <= top_p")], "crosses top_p is dropped"),
    ("nucleus", [("before < top_p", "(ranked.cumsum(0) <= top_p) | (before == 0)")], "crosses top_p is dropped"),
    ("nucleus", [("before < top_p", "before <= top_p")], "one token too many"),
    ("nucleus", [("before < top_p", "ranked >= top_p")], "own probability"),
    (
        "nucleus",
        [("order[before < top_p]", "order[: int((ranked.cumsum(0) >= top_p).int().argmax()) + 1]")],
        "argmax then says 0",
    ),
    ("nucleus", [(" / result.sum()", "")], "add up to 1 again"),
    ("nucleus", [("descending=True", "descending=False")], "descending=True"),
    ("nucleus", [(STAYS, "result[: len(stays)] = ranked[: len(stays)]")], "back at its own token"),
    ("nucleus", [("order[before < top_p]", "probs >= ranked[before < top_p].min()")], "cut by rank"),
    ("batch", [('return batch, "room"', 'return batch + 1, "room"')], "one less"),
    ("batch", [("batch = 0", "batch = 1")], "the answer is 0"),
    ("batch", [(' - config.weight_bytes("bfloat16")', "")], "must hold the weights"),
    ("batch", [("(context + 1)", "context")], "context \\+ 1 tokens"),
    ("batch", [("(batch + 1) * (context", "batch * (context")], "one less"),
    ("batch", [("(batch + 1) * (context + 1)", "(context + 1)")], "of every request"),
    ("batch", [("> limit", "> limit and batch > 499")], "too slow"),
    (
        "batch",
        [("device, batch + 1, context", "device, 1, context"), ("while True", "while batch < 501")],
        "whole batch",
    ),
    ("batch", [("batch + 1, context)", "batch + 1, context + 1)")], "stored before the step: .*not one more"),
    ("batch", [("batch + 1, context)", "batch + 1, context - 1)")], "stored before the step: .*not one less"),
    ("batch", [("batch + 1, context)", "batch + 1, context + 5)")], "the result"),
    ("batch", [('batch, "time"', 'batch, "room"')], "name the limit"),
    (
        "decode",
        [
            ("(1, (k.shape[1], -1))", "(1, (-1, k.shape[1])).transpose(1, 2)"),
            (".flatten(", ".transpose(1, 2).flatten("),
        ],
        "tiling the heads",
    ),
    ("decode", [(" / q.shape[-1] ** 0.5", "")], "not scaled"),
    ("decode", [("[rows, :, slots]", "[rows, :, slots + 1]")], "one slot too far"),
    ("decode", [("[rows, :, slots]", "[rows, :, slots - 1]")], "overwrites the last stored one"),
    ("decode", [("> slots", ">= slots")], r"lengths\[s\] \+ 1"),
    ("decode", [(".masked_fill(unseen[:, None, :, None], 0.0)", "")], "zero times NaN is NaN"),
    ("decode", [("unseen = torch.arange(end) > slots[:, None]", BY_NAN)], "never written need not be NaN"),
    (
        "decode",
        [
            ("end = max(lengths) + 1", "end = keys.shape[2]"),
            ("unseen = torch.arange(end) > slots[:, None]", BY_NAN),
        ],
        "never written need not be NaN",
    ),
    ("decode", [("end = max(lengths) + 1", "end = keys.shape[2]"), ("> slots", "> end + 0 * slots")], "never written"),
    ("decode", [("    keys[rows", "    keys, values = keys.clone(), values.clone()\n    keys[rows")], "after the call"),
    ("decode", [("    keys[rows, :, slots], values[rows, :, slots] = k, v\n", "")], "not stored before attending"),
    ("turn", [("len(prompt) - 1)", "len(prompt))")], "feed at least the last token"),
    ("turn", [("range(keep, len(prompt))", "range(len(prompt) - keep)")], "these start at 0"),
    ("turn", [("range(keep, len(prompt))", "range(keep + 1, len(prompt) + 1)")], "off by one"),
    (
        "turn",
        [("range(keep, len(prompt))", "range(len(cached), len(cached) + len(prompt) - keep)")],
        "not where the cache ended",
    ),
    ("turn", [(" and cached[keep] == prompt[keep]", "")], "not the tokens"),
    ("turn", [("return keep", "keep = 0\n    return keep")], "nothing is kept"),
    ("turn", [("return keep", "keep = max(0, keep - 1)\n    return keep")], "one token too few"),
    (
        "turn",
        [
            (
                "return keep",
                "keep = min(sum(map(int.__eq__, cached, prompt)), len(prompt) - 1)\n    return keep",
            )
        ],
        "hold another past",
    ),
]
EXERCISES = dict(zip(["latencies", "attention", "nucleus", "batch", "decode", "turn"], BUILT, strict=True))


@pytest.mark.parametrize(("exercise", "edits", "message"), SLIPS, ids=lambda value: str(value)[:40])
def test_a_wrong_answer_fails_and_is_told_why(exercise, edits, message):
    """B3: weak checks let wrong code pass. Also E6, E15 and E17, as a reader would make them."""
    chapter, cell, check = EXERCISES[exercise]
    wrong = answered(chapter, cell, *edits)
    for _ in range(8):
        with pytest.raises(CheckFailed, match=f"(?s){message}") as failed:
            check(wrong)
        assert not isinstance(failed.value, NotAnswered)
        assert "\n  on the input " in str(failed.value)


def test_there_are_at_least_three_wrong_answers_to_each_exercise():
    for name in EXERCISES:
        assert sum(slip[0] == name for slip in SLIPS) >= 3
    for check in {check for check, *_ in NUMBERS}:
        assert sum(entry[0] is check for entry in NUMBERS) >= 3, check.__name__


REGIMES = {"a": "memory", "b": "compute", "c": "memory", "d": "overhead", "e": "compute"}
RIGHT = {
    ch01.waste: (19, 11, 24),
    ch01.doubling: (2, 2.02),
    ch02.bound: (72, 279, 1400, 42.3),
    ch02.regimes: (REGIMES,),
    ch02.free_batch: (SECONDS, 8, 3.85),
    ch02.long_context: (1, "while the keys and values are small"),
    ch03.room: (128, 512, 14, 3),
    ch03.concatenating: (3, 2, "the context is long"),
}
NUMBERS = [  # check, which argument is wrong, the wrong value, what the message says
    (ch01.waste, 0, 18, "short: 18 new tokens is not right; at that length it is still below"),
    (ch01.waste, 0, 20, "short: .*one token earlier"),
    (ch01.waste, 0, 10, "short: .*very long prompt"),
    (ch01.waste, 0, "nineteen", "short: expected a number"),
    (ch01.waste, 1, 10, "long: .*round up"),
    (ch01.waste, 1, 19, "long: .*prompt of one token"),
    (ch01.waste, 1, 300, "long: .*too large by more than a factor of 10"),
    (ch01.waste, 2, 23, r"dear: .*p \+ k - 1 tokens"),
    (ch01.waste, 2, 43, "dear: .*the prompt is among them"),
    (ch01.waste, 2, 25, "dear: 25 is not right; it is too large"),
    (ch01.doubling, 0, 1, "new_per_prompt: .*n = p"),
    (ch01.doubling, 0, 0.5, "new_per_prompt: .*answer over the prompt"),
    (ch01.doubling, 0, 3, "new_per_prompt: .*which row"),
    (ch01.doubling, 1, 4, "growth: .*far shorter than its prompt"),
    (ch01.doubling, 1, 2, "growth: .*second term"),
    (ch01.doubling, 1, 1.97, "growth: 1.97 times the work is not right; it is too small$"),
    (ch01.doubling, 1, 2.08, "growth: 2.08 times the work is not right; it is too large$"),
    (ch01.doubling, 1, 2.02 / 8, "growth: .*it is too small$"),
    (ch01.doubling, 1, "two", "growth: expected a number times the work, got 'two'"),
    (ch01.doubling, 1, 1, "growth: .*does grow"),
    (ch02.bound, 0, 144, "rate16: .*two bytes"),
    (ch02.bound, 0, 9, "rate16: .*divides by bits"),
    (ch02.bound, 0, 72 * 1.024, "rate16: .*it is too large$"),
    (ch02.bound, 0, 72_000, "rate16: .*factor of 1,000"),
    (ch02.bound, 2, "1.4 TB/s", "bandwidth: expected a number in GB/s"),
    (ch02.bound, 2, 1400 / 1.024**3, "bandwidth: .*GB are 10⁹ bytes"),
    (ch02.bound, 3, "many", "batch4: expected a number of requests"),
    (ch02.bound, 0, 11_800, "rate16: .*bound of arithmetic"),
    (ch02.bound, 1, 288, "rate4: .*leaves out the scales"),
    (ch02.bound, 1, 57.6, "rate4: .*an eighth of a bit"),
    (ch02.bound, 1, 34.9, "rate4: .*divide by 8"),
    (ch02.bound, 2, 700, "bandwidth: .*two bytes"),
    (ch02.bound, 2, 1.4, "bandwidth: .*TB/s"),
    (ch02.bound, 3, 164, "batch4: .*earlier crossover"),
    (ch02.bound, 3, 41, "batch4: .*leaves out the scales"),
    (ch02.bound, 3, 84.5, "batch4: .*two operations per request"),
    (ch02.bound, 3, 169, "batch4: .*divide by two"),
    (ch02.regimes, 0, REGIMES | {"a": "compute"}, r"operation a: 'compute' .*33\.6 MB .*how long does each take"),
    (ch02.regimes, 0, REGIMES | {"c": "compute"}, "operation c"),
    (ch02.regimes, 0, REGIMES | {"d": "memory"}, "operation d"),
    (ch02.regimes, 0, REGIMES | {"e": "memory"}, "operation e"),
    (ch02.regimes, 0, REGIMES | {"b": "arithmetic"}, "operation b: 'arithmetic' is not one of"),
    (ch02.regimes, 0, {"a": "memory"}, "regimes: expected a dict with the keys a, b, c, d, e"),
    (ch02.free_batch, 1, 16, r"last: 16 is not right; .*1 to 2: 1\.900, .*8 to 16: 1\.600"),
    (ch02.free_batch, 1, 4, "last: 4 is not right; .*the batch after doubling"),
    (ch02.free_batch, 1, 1, "last: 1 is not right"),
    (ch02.free_batch, 2, 4.16, "speedup: .*how many more tokens"),
    (ch02.free_batch, 2, 16, "speedup: .*no longer at all"),
    (ch02.free_batch, 2, 0.26, "speedup: .*inverse"),
    (ch02.free_batch, 2, "four", "speedup: expected a number times the tokens/s of batch 1, got 'four'"),
    (ch02.long_context, 0, 0.125, "kv_over_weights: .*batch of eight|kv_over_weights: .*those of the batch"),
    (ch02.long_context, 0, 2, "kv_over_weights: .*before doubling"),
    (ch02.long_context, 1, "always", "conclusion: .*second table"),
    (ch02.long_context, 1, "never", "conclusion: .*first row"),
    (ch03.room, 0, 64, "grouped: .*one of these factors is missing"),
    (ch03.room, 0, 4, "grouped: .*one layer"),
    (ch03.room, 0, 512, "grouped: .*query heads"),
    (ch03.room, 0, 131.072, "grouped: .*kB"),
    (ch03.room, 1, 128, "full: .*more heads"),
    (ch03.room, 2, 15, "sequences: .*a GB is 10⁹ bytes here; or you did not round down"),
    (ch03.room, 2, 7, "sequences: 7 sequences is not right; it is too small$"),
    (ch03.room, 2, 14.8, "sequences: .*round down"),
    (ch03.room, 2, 44, "sequences: .*weights need their place"),
    (ch03.room, 2, 60_577, "sequences: .*a sequence has 4,096"),
    (ch03.room, 3, 4, "sequences_full: .*round down"),
    (ch03.room, 3, 14, "sequences_full: 14 sequences is not right"),
    (ch03.concatenating, 0, 2, "cache_alone: .*once more"),
    (ch03.concatenating, 0, 1000, "cache_alone: .*too large"),
    (ch03.concatenating, 1, 3, "with_weights: .*leaves out the weights"),
    (ch03.concatenating, 1, 4, "with_weights: .*divide"),
    (ch03.concatenating, 2, "the context is short", "conclusion: .*nearly all that is read"),
    (ch03.concatenating, 2, "the model is large", "conclusion: .*smaller part"),
]


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_the_right_numbers_pass_and_are_confirmed(check, capsys):
    check(*RIGHT[check])
    assert all(line.startswith("✓ ") for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(("check", "place", "wrong", "message"), NUMBERS, ids=lambda value: str(value)[:30])
def test_a_wrong_number_fails_and_is_told_why(check, place, wrong, message, capsys):
    """B3 for what is worked out or concluded."""
    answers = list(RIGHT[check])
    answers[place] = wrong
    with pytest.raises(CheckFailed, match=f"^{message}"):
        check(*answers)


# What the checks take for right, held to the engine.


def test_the_references_agree_with_the_engine():
    draw = Draw(7)
    for q, k, v, lengths in ch01.attention_cases(draw):
        torch.testing.assert_close(ch01.right_attention(q, k, v, lengths), NoCache(lengths).attend(0, q, k, v))
    for size in (3, 40, 333):
        probs, top_p = draw.tensor(size, dtype=torch.float64).softmax(0), draw.uniform(0.05, 0.99)
        engine = probabilities(probs.log()[None], [SamplingParams(top_p=top_p)])[0]
        torch.testing.assert_close(ch01.right_nucleus(probs, top_p), engine)


def test_a_decode_step_of_the_reference_is_that_of_the_cache():
    draw = Draw(8)
    for q, k, v, keys, values, lengths in ch03.decode_cases(draw):
        heads, kv_heads, size = q.shape[1], k.shape[1], 2 * q.shape[2]
        q, k, v, keys, values = (torch.cat([x, x.flip(-1)], -1) for x in (q, k, v, keys, values))  # an even head size
        config = ModelConfig(11, 8, 1, heads, kv_heads, size, 8, 64)
        cache = ContiguousCache(config, len(lengths), keys.shape[2], dtype=torch.float64)
        cache.k[0], cache.v[0], cache.lengths = keys, values, list(lengths)
        expected = cache.view([1] * len(lengths)).attend(0, q, k, v)
        torch.testing.assert_close(ch03.right_decode(q, k, v, keys, values, lengths), expected)
        torch.testing.assert_close(keys, cache.k[0], equal_nan=True)


def test_the_reference_for_the_next_turn_gives_the_logits_of_a_fresh_start():
    """E6: and one token more kept, or a shifted position, does not."""
    config = ModelConfig(128, 24, 2, 4, 2, 6, 40, 64)
    model = Transformer(config).initialize(3).double().requires_grad_(False)

    def last(tokens, positions, cache):
        return model(torch.tensor(tokens), torch.tensor(positions), cache)[-1]

    for cached, prompt in ch03.turn_cases(Draw(9)):
        keep, tokens, positions = ch03.right_next_turn(cached, prompt)
        expected = last(prompt, range(len(prompt)), NoCache())
        for kept, shift in [
            (keep, 0),
            *([(keep + 1, 0)] if keep + 1 < min(len(cached), len(prompt)) else []),
            (keep, 1),
        ]:
            cache = ContiguousCache(config, dtype=torch.float64)
            if cached:
                last(cached, range(len(cached)), cache)
            cache.truncate(0, kept)
            found = last(prompt[kept:], [p + shift for p in range(kept, len(prompt))], cache)
            right = (kept, shift) == (keep, 0) or (shift and keep == 0)  # turning all positions alike changes nothing
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9) == bool(right)


def test_a_known_mistake_never_breaks_the_check_that_looks_for_it():
    """Whatever the wrong answer is, every remark's function can be asked about every case."""
    for cases, mistakes in [
        (ch01.latency_cases, ch01.LATENCY_MISTAKES),
        (ch01.attention_cases, ch01.ATTENTION_MISTAKES),
        (ch01.nucleus_cases, ch01.NUCLEUS_MISTAKES),
        (ch02.batch_cases, ch02.BATCH_MISTAKES),
        (ch03.decode_cases, ch03.DECODE_MISTAKES),
        (ch03.turn_cases, ch03.TURN_MISTAKES),
    ]:
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


def test_the_conditions_in_the_text_are_those_that_the_checks_use():
    """B4: a constant typed twice drifts."""
    texts = {
        "01_naive_generation": [
            f"at least {ch01.WASTE} times", f"prompt of {ch01.LONG_PROMPT} tokens",
            f"takes {ch01.FIXED_MS} ms + {ch01.TOKEN_MS} ms", f"the prompt is {ch01.SHORT_PROMPT} tokens",
            f"reads {ch01.READ:,} tokens and writes {ch01.WRITE}", f"writes {2 * ch01.WRITE} instead",
        ],
        "02_memory_bound": [
            f"{ch02.BILLION_WEIGHTS} billion weights", f"an {ch02.CARD.name}:",
            f"{ch02.CARD.bandwidth / 1e9:,.0f} GB/s",
            f"{ch02.CARD.peak('bfloat16') / 1e12} TFLOP/s", f"claims {ch02.CLAIMED_RATE} tokens",
            f"writes {ch02.BANDWIDTH / 1e9:,.0f} GB/s, does {ch02.FLOPS / 1e12:.0f} TFLOP/s",
            f"needs {ch02.STARTING * 1e6:.0f} µs", f"at most {ch02.FREE} times as long as before",
        ],
        "03_kv_cache": [
            f"{ch03.LAYERS} layers and {ch03.HEADS} query heads that share {ch03.KV_HEADS} key/value heads",
            f"size {ch03.HEAD_DIM}", f"{ch03.WEIGHT_GB} GB in 16 bits", f"card has {ch03.MEMORY_GB} GB",
            f"sequences of {ch03.TOKENS:,} tokens",
        ],
    }  # fmt: skip
    for name, phrase in itertools.chain.from_iterable(zip(itertools.repeat(n), p) for n, p in texts.items()):
        assert phrase in prose(name), phrase
