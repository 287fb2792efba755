"""The exercises of chapter 9: answers right and wrong for `test_exercises.py`; the references are the module's."""

import pytest
from solutions import answered, code, prose

from minillm.cluster import exposed_time
from minillm.lab.answers import ch09
from minillm.lab.checks import Draw

CHAPTER = "09_disaggregation"
BUILT = {"overlap": ch09.left_to_wait, "split": ch09.best_split}
FLOORED = "int(gpus * decode_rate / (decode_rate + 1 / prefill))"
BATCH = "max(b for b in range(1, limit + 1) if base + each * b <= tpot)"
WRONG_BUILT = [
    ("overlap", [("return free - computed", "return free")], "when everything has left"),
    ("overlap", [("max(computed, free) + t", "free + t"), ("free - computed", "free")], "only when all is computed"),
    ("overlap", [("max(computed, free) + t", "free + t"), ("free - computed", "max(0.0, free - computed)")],
     "before it is computed"),
    ("overlap", [("max(computed, free) + t", "computed + t")], "others may still be in front"),
    ("overlap", [("max(computed, free) + t", "free + t")], "cannot be negative"),
    ("overlap", [("return free - computed", "return max(transfer[-1], sum(transfer) - sum(compute[1:]))")],
     "stand idle between layers"),
    ("overlap", [("    computed = free = 0.0", "    layers = len(compute)\n    return max(sum(transfer) / layers, "
                  "sum(transfer) - sum(compute) * (layers - 1) / layers)")], "for equal layers"),
    ("split", [("return best, gpus - best", "return gpus - best, best")], "come first in the pair"),
    ("split", [("min(p / prefill, (gpus - p) * decode_rate)", "min(p * decode_rate, (gpus - p) / prefill)")],
     "mixed up"),
    ("split", [("min(p / prefill, (gpus - p) * decode_rate)", "p / prefill + (gpus - p) * decode_rate")],
     "not their sum"),
    ("split", [("decode_rate = batch /", "decode_rate = 1 /")], "the whole batch"),
    ("split", [("((tokens - 1) * (base + each * batch))", "(base + each * batch)")], "needs many steps"),
    ("split", [("(base + each * batch))", "base)")], "a full batch takes"),
    ("split", [("(base + each * batch))", "tpot)")], "only its limit"),
    ("split", [(" if base + each * b <= tpot", "")], "within tpot"),
    ("split", [("range(1, limit + 1)", "range(1, 1000)")], "a limit of its own"),
    ("split", [("<= tpot", "< tpot")], "on target to the bit"),
    ("split", [("(tokens - 1)", "tokens")], "comes from the prefill"),
    ("split", [("range(1, gpus), key", "range(gpus - 1, 0, -1), key")], "fewer prefill GPUs"),
    ("split", [("max(range(1, gpus), key=served)",
                "min(gpus - 1, max(1, round(gpus * decode_rate / (decode_rate + 1 / prefill))))")], "try them all"),
    ("split", [("max(range(1, gpus), key=served)", FLOORED)], "rounding the ratio down .*try them all"),
    ("split", [(BATCH, "min(limit, round((tpot - base) / each))")], "longer than tpot"),
    ("split", [(BATCH, "min(limit, -int((base - tpot) // each))")], "longer than tpot"),
    ("split", [("max(range(1, gpus), key=served)",
                "next(p for p in range(1, gpus) if p == gpus - 1 or p / prefill >= (gpus - p) * decode_rate)")],
     "keep up, .*try them all"),
    ("split", [("((tokens - 1) * (base + each * batch))", "(prefill + (tokens - 1) * (base + each * batch))")],
     "prefill keeps other GPUs busy"),
    ("split", [("range(1, gpus), key", "range(2, gpus + 1), key")], "should be"),
]  # fmt: skip
# The checks' numbers are powers of two, so that a division finds the batch as a loop does.
OTHER_WAYS = [("split", answered(CHAPTER, "split", (BATCH, "min(limit, int((tpot - base) / each))")))]
RIGHT = {
    ch09.send: (524.288, 41.943, 200, 20.97),
    ch09.division: ("TTFT", 3, "TPOT", "turn a prefill GPU into a decode GPU"),
}
WRONG_NUMBERS = [  # check, which argument is wrong, the wrong value, what the message says
    (ch09.send, 0, 262.1, "size: .*one of these factors is missing"),
    (ch09.send, 0, 16.384, "size: .*one layer"),
    (ch09.send, 0, 0.131, "size: .*one token"),
    (ch09.send, 0, 65.5, "size: .*one key/value head"),
    (ch09.send, 0, 500.0, "size: .*MiB"),
    (ch09.send, 1, 5.24, "transfer: .*in bits"),
    (ch09.send, 1, 0.0419, "transfer: .*seconds"),
    (ch09.send, 1, 1.31, "transfer: .*the last layer"),
    (ch09.send, 2, 0.2, "recompute: .*seconds"),
    (ch09.send, 2, 5000, "recompute: .*other way round"),
    (ch09.send, 3, 2.62, "break_even: .*GB/s"),
    (ch09.send, 3, 167.8, "break_even: .*once too often"),
    (ch09.send, 3, 476.8, "break_even: .*other way round"),
    (ch09.send, 3, 100, "break_even: .*faster than it must be"),
    (ch09.division, 0, "TPOT", "short_prefill: .*end of the prefill"),
    (ch09.division, 1, 1, "most_decode: .*most crowded"),
    (ch09.division, 1, 2, "most_decode: .*better still"),
    (ch09.division, 2, "TTFT", "slow_link: .*does not wait"),
    (ch09.division, 2, "both", "slow_link: .*does not change"),
    (ch09.division, 3, "cut prompts into chunks", "conclusion: .*share no step"),
    (ch09.division, 3, "turn a decode GPU into a prefill GPU", "conclusion: .*crowd"),
]  # fmt: skip
MISTAKES = [(ch09.wait_cases, ch09.WAIT_MISTAKES), (ch09.split_cases, ch09.SPLIT_MISTAKES)]


def test_the_references_agree_with_the_module_and_the_solutions():
    for layers, compute, transfer in ((1, 3.0, 2.0), (4, 2.0, 7.0), (40, 9.0, 1.0)):
        alike = [compute / layers] * layers, [transfer / layers] * layers
        assert ch09.right_wait(*alike) == pytest.approx(exposed_time(compute, transfer, layers))
    for case in ch09.wait_cases(Draw(1)):
        assert ch09.right_wait(*case) == pytest.approx(answered(CHAPTER, "overlap")(*case))
    for case in ch09.split_cases(Draw(1)):
        assert ch09.right_split(*case) == answered(CHAPTER, "split")(*case)


def test_each_known_mistake_is_caught():
    """Each remark's function differs from the right one on some case of nearly every draw."""
    for cases, right, mistakes in [
        (ch09.wait_cases, ch09.right_wait, ch09.WAIT_MISTAKES),
        (ch09.split_cases, ch09.right_split, ch09.SPLIT_MISTAKES),
    ]:
        for remark, mistake in mistakes.items():
            drawn = list(cases(Draw(11)))
            assert any(mistake(*case) != right(*case) for case in drawn), remark


def test_the_tables_of_the_last_exercise_show_what_the_check_takes_for_right():
    source = code("solutions", CHAPTER)
    namespace = {}
    exec(source["imports"], namespace)
    exec(source["division-run"].partition("\nrows = ")[0], namespace)
    from minillm.cluster import LINKS, apart
    from minillm.metrics import summarize
    from minillm.workload import fixed, make_workload, poisson

    def medians(load, split, link="NVLink (A100)"):
        prompt, answer, rate = namespace["LOADS"][load]
        requests = make_workload(60, fixed(prompt), fixed(answer), 50_272, poisson(rate), seed=2)
        prefill = namespace["gpus"](split[0], chunked_prefill=False, max_batch_size=1)
        run = summarize(apart(requests, prefill, namespace["gpus"](split[1]), LINKS[link]))
        return run.ttft.p50, run.tpot.p50

    first, second = namespace["LOADS"]
    short = [medians(first, split) for split in namespace["SPLITS"]]
    assert short[0][0] > 2 * short[2][0] and short[0][1] < short[2][1]
    long = [medians(second, split)[1] for split in namespace["SPLITS"]]
    assert min(long) == long[0] and long[2] > 1.15 * long[0]
    fast, slow = (medians(first, (2, 2), link) for link in ("NVLink (A100)", "network, 25 Gb/s"))
    assert slow[0] == pytest.approx(fast[0]) and slow[1] > 1.2 * fast[1]


def test_the_conditions_in_the_text_are_those_that_the_check_uses():
    """B4: a number typed twice drifts."""
    text = prose(CHAPTER)
    assert f"{ch09.LAYERS} layers, {ch09.KV_HEADS} key/value heads of size {ch09.HEAD_DIM}, and 16-bit" in text
    assert f"prompt of {ch09.TOKENS:,} tokens" in text and f"at {ch09.RATE:,} tokens a second" in text
    assert f"The link carries {ch09.LINK} Gb/s" in text
