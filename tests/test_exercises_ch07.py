"""The exercises of chapter 7: answers right and wrong for `test_exercises.py`; the references are the engine's."""

import pytest
from solutions import cells, code, prose

from minillm.config import EngineConfig
from minillm.lab.answers import ch07
from minillm.lab.checks import Draw
from minillm.metrics import summarize
from minillm.request import Request, Status
from minillm.roofline import Device, weights_read
from minillm.sampling import SamplingParams
from minillm.scheduler import Scheduler
from minillm.simulate import published_model

CHAPTER = "07_chunked_prefill"
BUILT = {"share": ch07.share, "read": ch07.read_again}
ROUNDS = "    for limit in (most, budget):  # the second round has no limit but the budget"
# `share` is case E8, as a reader would make it.
WRONG_BUILT = [
    ("share", [("left = budget - sum(counts)", "left = budget")], "come out of the budget too"),
    ("share", [("counts = [1 if tokens == 1 else 0 for tokens in missing]", "counts = [0] * len(missing)")],
     "took the place of a decode"),
    ("share", [("(most, budget)", "(budget,)")], "at most `most`"),
    ("share", [("(most, budget)", "(most,)")], "goes round again"),
    ("share", [("(most, budget)", "(most, most)")], "no limit but what is missing"),
    ("share", [("            left -= granted\n", "")], "is gone for the next|should be"),
    ("share", [("tokens - counts[i], limit", "tokens, limit")], "should be"),
    ("share", [("in enumerate(missing)", "in reversed(list(enumerate(missing)))")], "should be"),
    ("share", [("return counts", "return counts[::-1]")], "should be"),
    ("share", [(ROUNDS, "    for limit in (min(most, left // max(1, len(missing))), budget):")], "should be"),
    ("share", [("            left -= granted\n", "            left -= granted\n            if limit == budget and"
                " granted and tokens > 1:\n                break\n")], "goes on to the next prompt"),
    ("share", [("in enumerate(missing)", "in (sorted if limit == budget else list)(enumerate(missing), "
                "**({'key': lambda pair: pair[1]} if limit == budget else {}))")], "oldest prompt comes first"),
    ("share", [(ROUNDS, "    for limit in [most] * (budget + 1):")], "no limit but what is missing"),
    ("read", [("-(-prompt // chunk)", "max(1, prompt // chunk)")], "round the number of chunks up"),
    ("read", [("(n - 1) * stored + ", "")], "stored before the prompt"),
    ("read", [("(n - 1) * stored", "(n > 1) * stored")], "once more"),
    ("read", [("(n - 1) * stored", "n * stored")], "one piece reads the stored"),
    ("read", [("chunk * n * (n - 1) // 2", "chunk * n * (n + 1) // 2")], "n - 1, not n"),
    ("read", [("chunk * n * (n - 1) // 2", "prompt * (n - 1) / 2")], "cut is ragged"),
    ("read", [("(n - 1) * stored + chunk * n * (n - 1) // 2", "(n > 1) * (stored + chunk * (n - 1))")],
     "the last chunk reads"),
    ("read", [("(n - 1) * stored + chunk * n * (n - 1) // 2", "(n - 1) * (stored + chunk * (n - 1) / 2)")], "they are"),
]  # fmt: skip

RIGHT = {
    ch07.budget: (13, 243, 937, 14),
    ch07.experiment: (512, "it hardly changes", "prompts wait in a queue", 256, "a larger budget"),
}
WRONG_NUMBERS = [  # check, which argument is wrong, the wrong value, what the message says
    (ch07.budget, 0, 8, "decode_ms: .*the weights alone"),
    (ch07.budget, 0, 5, "decode_ms: .*keys and values alone"),
    (ch07.budget, 0, 8.125, "decode_ms: .*its own tokens"),
    (ch07.budget, 0, 9, "decode_ms: .*two bytes"),
    (ch07.budget, 0, 0.013, "decode_ms: .*milliseconds"),
    (ch07.budget, 1, 243.75, "free: .*round down"),
    (ch07.budget, 1, 244, "free: .*round down"),
    (ch07.budget, 1, 487, "free: .*two operations"),
    (ch07.budget, 1, 203, "free: .*the decodes are tokens"),
    (ch07.budget, 1, 150, "free: .*keys and values take"),
    (ch07.budget, 2, 938, "largest: .*round down"),
    (ch07.budget, 2, 1875, "largest: .*two operations"),
    (ch07.budget, 2, 693, "largest: .*overlap"),
    (ch07.budget, 2, 897, "largest: .*counts all tokens"),
    (ch07.budget, 3, 13, "steps: .*round up|steps: .*the decodes take"),
    (ch07.budget, 3, 13.38, "steps: .*a part of a step is a step: round up"),
    (ch07.budget, 3, 12.8, "steps: .*a part of a step is a step: round up"),
    (ch07.experiment, 0, 1024, "largest: .*above 60 ms"),
    (ch07.experiment, 0, 256, "largest: .*a larger one does too"),
    (ch07.experiment, 1, "it shrinks in proportion", "waiting: .*each takes longer"),
    (ch07.experiment, 1, "it grows in proportion", "waiting: .*next column"),
    (ch07.experiment, 2, "each step is longer", "first_token: .*shorter"),
    (ch07.experiment, 2, "decodes go last", "first_token: .*come first"),
    (ch07.experiment, 3, 128, "enough: .*below the best"),
    (ch07.experiment, 3, 512, "enough: .*smaller budget"),
    (ch07.experiment, 4, "a smaller budget", "offline: .*more steps"),
    (ch07.experiment, 4, "the same", "offline: .*fewer steps"),
]  # fmt: skip
MISTAKES = [(ch07.share_cases, ch07.SHARE_MISTAKES), (ch07.read_cases, ch07.READ_MISTAKES)]


# What the checks take for right, held to the engine, and the texts to the checks.


def test_without_a_limit_the_fair_share_is_the_schedulers_own():
    """E8: with running requests that miss these tokens, the engine's scheduler grants what the exercise's rule does."""
    for missing, budget, _ in ch07.share_cases(Draw(3)):
        config = EngineConfig(block_size=1, num_blocks=4000, token_budget=budget, prefix_caching=False)
        scheduler = Scheduler(config, 10_000, 4000)
        for number, tokens in enumerate(missing):
            request = Request(number, [1] * tokens, SamplingParams(max_tokens=2))
            request.status = Status.RUNNING
            scheduler.running.append(request)
        granted = {request.id: count for request, count in scheduler._grants()}
        expected = ch07.right_share(missing, budget, most=10**6)
        assert [granted.get(number, 0) for number in range(len(missing))] == expected


def test_a_share_never_exceeds_the_budget_and_never_forgets_a_decode():
    for missing, budget, most in ch07.share_cases(Draw(8)):
        counts = ch07.right_share(missing, budget, most)
        assert sum(counts) == min(budget, sum(missing))
        assert all(count == 1 for count, tokens in zip(counts, missing, strict=True) if tokens == 1)


def test_what_is_read_again_is_the_closed_formula():
    for prompt, chunk, stored in ch07.read_cases(Draw(4)):
        n = -(-prompt // chunk)
        assert ch07.right_read_again(prompt, chunk, stored) == (n - 1) * stored + chunk * n * (n - 1) // 2


def test_the_exercise_states_the_conditions_that_the_check_uses():
    """B4."""
    said = prose(CHAPTER)
    for phrase in (
        f"{ch07.WEIGHTS / 1e9:.0f} billion weights of 16 bits",
        f"{ch07.TOKEN_BYTES:,} bytes for each stored token",
        f"{ch07.BANDWIDTH / 1e9:,.0f} GB a second and computes {ch07.PEAK / 1e12:.0f} trillion",
        f"{ch07.RUNNING} requests are running, with {ch07.STORED:,} stored tokens",
        f"is {1000 * ch07.TARGET:.0f} ms",
        f"a prompt of {ch07.PROMPT:,} tokens",
    ):
        assert phrase in said


def test_the_experiment_gives_the_numbers_that_the_check_expects():
    namespace: dict = {}
    exec(code("solutions", CHAPTER)["imports"], namespace)
    source = code("solutions", CHAPTER)["experiment-run"]
    exec(source[: source.index("rows = []")], namespace)
    budgets = (64, 128, 256, 512, 1024, 2048, 4096)
    assert str(budgets) in source and namespace["summarize"] is summarize
    arriving = {budget: namespace["serve"](budget, namespace["asked"]) for budget in budgets}
    offline = {budget: namespace["serve"](budget, namespace["at_once"]).throughput for budget in budgets}
    assert max(b for b in budgets if arriving[b].itl.p99 <= 0.06) == ch07.LARGEST_WITHIN
    assert min(b for b in budgets if offline[b] >= 0.95 * max(offline.values())) == ch07.ENOUGH_OFFLINE
    assert arriving[4096].itl.p99 > 4 * arriving[512].itl.p99  # "several times over"
    assert 0.85 < arriving[4096].ttft.p50 / arriving[512].ttft.p50 < 1.15  # "it hardly changes"
    assert arriving[64].ttft.p50 > 4 * arriving[128].ttft.p50  # "prompts wait in a queue"


def test_the_numbers_of_the_chapter_are_what_our_formulas_give():
    """B4: the pencil exercise of the chapter, and the limit that it predicts for prompts first."""
    mistral, a100 = published_model("Mistral-7B"), Device.datasheet("A100-80GB")
    read, token = weights_read(mistral), mistral.kv_bytes_per_token()
    said = " ".join("".join(cell["source"]) for cell in cells(".", CHAPTER) if cell["cell_type"] == "markdown")
    reading = (2 * read + 32 * 4096 * token) / a100.bandwidth
    free = reading * a100.peak("bfloat16") / (2 * read)
    for phrase in (
        f"{read / 1e9:.2f} billion weights ({2 * read / 1e9:.1f} GB)",
        f"{token:,.0f} bytes for each of 32 · 4,096 stored tokens ({32 * 4096 * token / 1e9:.1f} GB)",
        f"at {a100.bandwidth / 1e9:,.0f} GB/s",
        f"{2 * read / 1e9:.1f} billion operations a token at {a100.peak('bfloat16') / 1e12:.0f} trillion a second",
        f"{free:.0f} tokens are free, the decodes among them: that many take as long to compute as "
        f"{(2 * read + 32 * 4096 * token) / 1e9:.1f} GB take to read",
        f"0.01 / (0.5 · 0.015) = {0.01 / (0.5 * 0.015):.1f} requests a second",
        f"{256 - 40} tokens of the budget are left in each step, and 2,000 / {256 - 40} is {2000 / 216:.1f}: ten",
    ):
        assert phrase in said, phrase


@pytest.fixture(scope="module")
def replayed() -> dict:
    """The names of the chapter's cells that replay on numbers alone, after they have run."""
    source, namespace = code(".", CHAPTER), {}
    source["setup"] = source["setup"].partition("here = lab.setup()")[0]
    source["idea-steps"] = source["idea-steps"].partition("crowd = ")[0]
    replays = ["rules", "crowd", "play", "workload", "run", "search", "table"]
    for name in ("setup", "idea-steps", "build-share", *(f"capacity-{part}" for part in replays), "explorer"):
        exec(source[name], namespace)
    namespace["capacities"] = namespace["rows"]
    exec(source["loses-run"].partition("columns = ")[0], namespace)
    return namespace


def test_the_search_ends_where_the_text_says(replayed):
    """B4: a search that stops at its own upper end finds nothing; the ratios lie about the paper's."""
    published = ([2.6], [3.7], [3.6, 4.3])
    for (model, gpus, *_), kinds, paper in zip(replayed["trials"], replayed["found"], published, strict=False):
        most, ratios = replayed["full"](model, gpus), []
        for (_, first, stalled), (_, chunked, queued) in kinds:
            assert (stalled, queued) == ("gaps", "waits")
            assert 0.15 * most < first <= 0.25 * most  # "more than three quarters of the arithmetic are idle"
            ratios.append(chunked / first)
        assert 0.8 < kinds[0][1][1] / most < 1  # "a little below full"
        assert 0.45 < kinds[1][1][1] / most < 0.7  # "about half of that rate, or somewhat above"
        assert all(0.95 * min(ratios) < ratio < 1.05 * max(ratios) for ratio in paper)
    relaxed = [chunked / first for (_, first, _), (_, chunked, _) in replayed["found"][3]]
    assert all(1 < ratio < 1.65 for ratio in relaxed)
    assert not any("≥" in str(row) for row in replayed["capacities"])


def test_what_chunks_cost_in_time_is_what_the_summary_says(replayed):
    """B4."""
    apart = [row for row in replayed["rows"] if "overlap" not in row[0]]
    for place, low, high in ((1, 1.02, 1.05), (2, 1.10, 1.25)):
        times = [float(row[place].rstrip("×")) for row in apart]
        assert min(times) == low and max(times) == high
    said = " ".join("".join(cell["source"]) for cell in cells(".", CHAPTER) if cell["cell_type"] == "markdown")
    assert "2 to 5% with a budget of 2,048, 10 to 25% with 512 unless reading and computing overlap" in said
