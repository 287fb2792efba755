"""The exercises of chapter 1: answers right and wrong for `test_exercises.py`; the references are the engine's."""

import torch
from solutions import prose

from minillm.lab.answers import ch01
from minillm.lab.checks import Draw
from minillm.naive import NoCache
from minillm.sampling import SamplingParams, probabilities

CHAPTER = "01_naive_generation"
BUILT = {"latencies": ch01.latencies, "ragged": ch01.ragged_attention, "nucleus": ch01.nucleus}
STAYS = "result[stays] = probs[stays]"
# `ragged` is case E15, `nucleus` E17, as a reader would make them.
WRONG_BUILT = [
    ("latencies", [("arrivals[0] - asked", "arrivals[0]")], "subtract `asked`"),
    ("latencies", [("if gaps else None", "if gaps else 0.0")], "TPOT is None"),
    ("latencies", [("if gaps else None", "if sum(gaps) else None")], "a gap of 0 s is a gap"),
    ("latencies", [("if gaps else None", "")], "raised ZeroDivisionError"),
    ("latencies", [("/ len(gaps) if", "/ len(arrivals) if")], "have n - 1 gaps"),
    ("latencies", [("(arrivals[-1] - arrivals[0])", "(arrivals[-1] - asked)")], "start at the first arrival"),
    ("latencies", [("(arrivals[-1] - arrivals[0]) / len(gaps)", "(arrivals[-1] - asked) / len(arrivals)")],
     "count n - 1 gaps"),
    ("latencies", [('"itl": gaps', '"itl": [arrivals[0] - asked, *gaps]')], "the wait before the first is TTFT"),
    ("latencies", [('"itl": gaps', '"itl": max(gaps, default=0.0)')], "not the largest alone"),
    ("ragged", [(".repeat_interleave(group, dim=1)", ".repeat(1, group, 1)")], "tiling the heads.*repeat_interleave"),
    ("ragged", [(" / q.shape[-1] ** 0.5", "")], "not scaled"),
    ("ragged", [(" / q.shape[-1] ** 0.5", " / q.shape[-1]")], "square root"),
    ("ragged", [("q.shape[-1] ** 0.5", "q.shape[1] ** 0.5")], "root of the number of heads"),
    ("ragged", [(".tril()", ".tril(-1)")], "sees itself too"),
    ("ragged", [(".tril()", ".tril(1)")], "one token too many"),
    ("ragged", [(".tril()", "")], "causal mask is missing"),
    ("ragged", [("(owner[:, None] == owner[None, :])", "torch.ones(len(q), len(q), dtype=torch.bool)")],
     "sequences see each other"),
    ("ragged", [(".softmax(-1)", ".softmax(-2)")], r"on the input q = .*lengths = \["),
    ("nucleus", [("before < top_p", "ranked.cumsum(0) <= top_p")], "crosses top_p is dropped"),
    ("nucleus", [("before < top_p", "(ranked.cumsum(0) <= top_p) | (before == 0)")], "crosses top_p is dropped"),
    ("nucleus", [("before < top_p", "before <= top_p")], "one token too many"),
    ("nucleus", [("before < top_p", "ranked >= top_p")], "own probability"),
    ("nucleus", [("order[before < top_p]", "order[: int((ranked.cumsum(0) >= top_p).int().argmax()) + 1]")],
     "argmax then says 0"),
    ("nucleus", [("order[before < top_p]", "order")], "every token stays"),
    ("nucleus", [("order[before < top_p]", "probs >= probs.max() * (1 - top_p)")], "every token stays"),
    ("nucleus", [("order[before < top_p]", "probs > probs.max() * (1 - top_p)")], "1 tokens stay where 3 should"),
    ("nucleus", [(" / result.sum()", "")], "add up to 1 again"),
    ("nucleus", [("descending=True", "descending=False")], "descending=True"),
    ("nucleus", [(STAYS, "result[: len(stays)] = ranked[: len(stays)]")], "back at its own token"),
    ("nucleus", [("order[before < top_p]", "probs >= ranked[before < top_p].min()")], "cut by rank"),
]  # fmt: skip

RIGHT = {ch01.waste: (19, 11, 24), ch01.doubling: (2, 2.02)}
WRONG_NUMBERS = [  # check, which argument is wrong, the wrong value, what the message says
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
    (ch01.doubling, 1, 2.01, "growth: 2.01 times the work is not right; it is too small$"),
    (ch01.doubling, 1, 2.03, "growth: 2.03 times the work is not right; it is too large$"),
    (ch01.doubling, 1, 0.494, "growth: .*the inverse"),
    (ch01.doubling, 1, 2.08, "growth: 2.08 times the work is not right; it is too large$"),
    (ch01.doubling, 1, 2.02 / 8, "growth: .*it is too small$"),
    (ch01.doubling, 1, "two", "growth: expected a number times the work, got 'two'"),
    (ch01.doubling, 1, 1, "growth: .*does grow"),
]
MISTAKES = [
    (ch01.latency_cases, ch01.LATENCY_MISTAKES),
    (ch01.attention_cases, ch01.ATTENTION_MISTAKES),
    (ch01.nucleus_cases, ch01.NUCLEUS_MISTAKES),
]


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


OTHER_WAYS = [("ragged", looped_attention), ("nucleus", nucleus_from_the_end)]


def test_the_references_agree_with_the_engine():
    draw = Draw(7)
    for q, k, v, lengths in ch01.attention_cases(draw):
        torch.testing.assert_close(ch01.right_attention(q, k, v, lengths), NoCache(lengths).attend(0, q, k, v))
    for size in (3, 40, 333):
        probs, top_p = draw.tensor(size, dtype=torch.float64).softmax(0), draw.uniform(0.05, 0.99)
        engine = probabilities(probs.log()[None], [SamplingParams(top_p=top_p)])[0]
        torch.testing.assert_close(ch01.right_nucleus(probs, top_p), engine)


def test_the_conditions_in_the_text_are_those_that_the_checks_use():
    """B4: a constant typed twice drifts."""
    for phrase in (
        f"at least {ch01.WASTE} times", f"prompt of {ch01.LONG_PROMPT} tokens",
        f"takes {ch01.FIXED_MS} ms + {ch01.TOKEN_MS} ms", f"the prompt is {ch01.SHORT_PROMPT} tokens",
        f"reads {ch01.READ:,} tokens and writes {ch01.WRITE}", f"writes {2 * ch01.WRITE} instead",
    ):  # fmt: skip
        assert phrase in prose(CHAPTER), phrase
