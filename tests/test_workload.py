"""Workloads: seeded draws with the stated distributions, and a replay that neither loses nor delays a request."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.sampling import SamplingParams
from minillm.workload import (
    ALPACA_LIKE,
    SHAREGPT_LIKE,
    Refusal,
    TimedRequest,
    burst,
    capped_exponential,
    fixed,
    log_normal,
    make_workload,
    poisson,
    replay,
    uniform,
)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("mean, cap", [(128, 32), (128, 128), (128, 512), (128, 1536), (3, 2)])
def test_capped_exponential_is_the_conditional_distribution(mean, cap):
    """A rounded length k has mass e^-((k - 1/2)/m) - e^-((k + 1/2)/m) of what is kept; 0 counts as 1."""
    lengths = capped_exponential(mean, cap)(rng(), 200_000)
    edges = np.concatenate([[0], np.arange(cap + 1) + 0.5])
    mass = -np.diff(np.exp(-edges / mean))
    mass /= mass.sum()
    values = np.maximum(np.arange(cap + 1), 1)
    expected = mass @ values
    spread = math.sqrt((mass @ values**2 - expected**2) / len(lengths))
    assert lengths.min() == 1 and lengths.max() <= cap
    assert abs(lengths.mean() - expected) < 5 * spread


@pytest.mark.parametrize("cap, mean", [(32, 15.6), (128, 53.7), (512, 118.4), (1536, 128.0)])
def test_the_anyscale_means(cap, mean):
    """Expected output lengths of the four caps of Daniel et al., mean 128 before the cap."""
    assert capped_exponential(128, cap)(rng(1), 200_000).mean() == pytest.approx(mean, rel=0.01)


@pytest.mark.parametrize(
    "draw, mean", list(zip(SHAREGPT_LIKE + ALPACA_LIKE, [161.31, 337.99, 19.31, 58.45], strict=True))
)
def test_log_normal_means(draw, mean):
    """The means of Kwon et al., figure 11; the logarithm is normal with the sigma we assume."""
    lengths = draw(rng(2), 400_000)
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert np.median(lengths) == pytest.approx(mean * math.exp(-0.5), abs=0.5 + 0.02 * mean)
    assert np.log(lengths).std() == pytest.approx(1.0, abs=0.03)


def test_means_of_the_long_trace_when_cut():
    """At OPT's context, as the comment beside `SHAREGPT_LIKE` says."""
    requests = make_workload(10_000, *SHAREGPT_LIKE, vocab_size=2, max_total=2048, seed=5)
    lengths = np.array([(len(r.prompt_ids), r.params.max_tokens) for r in requests])
    assert lengths.sum(axis=1).max() <= 2048
    assert lengths.mean(axis=0) == pytest.approx([157, 304], rel=0.04)


def test_log_normal_cap_redraws():
    """Nothing above the cap, and nothing piled up on it."""
    lengths = log_normal(100, sigma=1.5, cap=150)(rng(3), 50_000)
    assert lengths.max() <= 150 and lengths.min() == 1
    assert (lengths == 150).sum() < 2 * (lengths == 149).sum() + 50


def test_uniform_and_fixed():
    lengths = uniform(3, 6)(rng(4), 40_000)
    assert set(lengths) == {3, 4, 5, 6}
    assert np.bincount(lengths)[3:] == pytest.approx([10_000] * 4, rel=0.05)
    assert uniform(7, 7)(rng(), 3).tolist() == fixed(7)(rng(), 3).tolist() == [7, 7, 7]


def test_poisson_counts_are_poisson():
    """Mean and variance of the arrivals in a second are both the rate; burst is all at once."""
    times = poisson(4.0)(rng(5), 100_000)
    assert (np.diff(times) >= 0).all() and times[0] > 0
    counts = np.bincount(times[:-1].astype(int))
    assert counts.mean() == pytest.approx(4, rel=0.03) and counts.var() == pytest.approx(4, rel=0.05)
    assert burst(rng(), 3).tolist() == [0, 0, 0]


def test_one_part_changes_and_the_others_stay():
    """Same seed, other rate: the same requests at scaled times. Other outputs: the same prompts at the same times."""
    slow, fast, at_once = (
        make_workload(40, uniform(1, 9), uniform(1, 9), 50, arrivals, seed=3)
        for arrivals in (poisson(1), poisson(8), burst)
    )
    assert [r.arrival for r in slow] == pytest.approx([8 * r.arrival for r in fast])
    assert [(r.prompt_ids, r.params) for r in slow] == [(r.prompt_ids, r.params) for r in fast]
    assert [(r.prompt_ids, r.params) for r in slow] == [(r.prompt_ids, r.params) for r in at_once]
    assert slow == make_workload(40, uniform(1, 9), uniform(1, 9), 50, poisson(1), seed=3)
    other = make_workload(40, uniform(1, 9), uniform(1, 9), 50, poisson(1), seed=4)
    assert [r.prompt_ids for r in slow] != [r.prompt_ids for r in other]
    longer = make_workload(40, uniform(1, 9), fixed(70), 50, poisson(1), seed=3)
    assert [r.arrival for r in longer] == [r.arrival for r in slow]


@settings(max_examples=50)
@given(st.integers(0, 2**40), st.integers(1, 20), st.integers(1, 300), st.integers(10, 60))
def test_a_workload_is_what_was_asked_for(seed, count, vocab_size, max_total):
    pattern = SamplingParams(temperature=0.5, seed=7, max_tokens=1, n=2)
    requests = make_workload(
        count, uniform(1, 40), log_normal(30), vocab_size, poisson(3), pattern, max_total=max_total, seed=seed
    )
    assert len(requests) == count
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    for request in requests:
        assert all(type(token) is int and 0 <= token < vocab_size for token in request.prompt_ids)
        assert 1 <= len(request.prompt_ids) <= 40
        assert len(request.prompt_ids) + request.params.max_tokens <= max_total
        assert replace(request.params, max_tokens=1, ignore_eos=False) == pattern and request.params.ignore_eos


def test_greedy_unless_told_otherwise():
    (request,) = make_workload(1, fixed(2), fixed(5), 10)
    assert request.params == SamplingParams(max_tokens=5, temperature=0, ignore_eos=True) and request.arrival == 0


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fixed(0), "length must be an integer of at least 1, got 0"),
        (lambda: fixed(True), "length must be an integer"),
        (lambda: fixed(2.5), "got 2.5"),
        (lambda: uniform(5, 4), "high must be an integer of at least 5, got 4"),
        (lambda: capped_exponential(0, 4), "mean must be a positive number, got 0"),
        (lambda: capped_exponential(math.inf, 4), "mean must be a positive number, got inf"),
        (lambda: capped_exponential(5, 0), "cap must be an integer of at least 1"),
        (lambda: log_normal(-1), "mean must be a positive number, got -1"),
        (lambda: log_normal(5, sigma=0), "sigma must be a positive number"),
        (lambda: log_normal(5, cap=1.5), "cap must be an integer"),
        (lambda: log_normal(1000, sigma=0.01, cap=5)(rng(), 3), "cap 5 is out of reach: .* left 3 draws above it"),
        (lambda: poisson(0), "rate must be a positive number, got 0"),
        (lambda: poisson(math.nan), "rate must be a positive number, got nan"),
        (lambda: make_workload(0, fixed(1), fixed(1), 9), "count must be an integer of at least 1, got 0"),
        (lambda: make_workload(1, fixed(1), fixed(1), 0), "vocab_size must be an integer of at least 1"),
        (lambda: make_workload(1, fixed(1), fixed(1), 9, seed=-1), "seed must be an integer of at least 0, got -1"),
        (lambda: make_workload(1, 5, fixed(1), 9), "prompts must be a distribution, such as fixed.* got 5"),
        (lambda: make_workload(1, fixed(1), fixed(1), 9, arrivals=2.0), "arrivals must be a distribution"),
        (lambda: make_workload(1, fixed(9), fixed(9), 9, max_total=17), "max_total 17 is out of reach"),
        (lambda: make_workload(1, fixed(9), fixed(9), 9, max_total=1), "max_total must be an integer of at least 2"),
        (lambda: TimedRequest(-0.1, [1], SamplingParams()), "arrival must be 0 or more seconds, got -0.1"),
        (lambda: TimedRequest(math.inf, [1], SamplingParams()), "arrival must be 0 or more seconds, got inf"),
        (lambda: TimedRequest(0, [], SamplingParams()), "prompt_ids must hold at least one token"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class ScriptedEngine:
    """An engine of one slot: a step takes a second and finishes the oldest request; prompts above 3 are refused."""

    def __init__(self):
        self.runner, self.clock, self.waiting, self.log = self, 100.0, [], []

    def now(self):
        return self.clock

    def wait_until(self, moment):
        assert moment > self.clock and not self.waiting, "only an idle engine waits"
        self.log.append(("wait", moment))
        self.clock = moment

    @property
    def has_unfinished(self):
        return bool(self.waiting)

    def add_request(self, prompt_ids, params, arrival):
        assert isinstance(prompt_ids, list)
        if len(prompt_ids) > 3:
            raise ValueError(f"prompt of {len(prompt_ids)} tokens does not fit")
        self.log.append(("add", arrival, self.clock))
        self.waiting.append((40 + len(self.log), prompt_ids))
        return self.waiting[-1][0]

    def step(self):
        self.clock += 1.0
        number, prompt = self.waiting.pop(0)
        unfinished = [SimpleNamespace(request_id=n, finished=False) for n, _ in self.waiting]
        return [*unfinished, SimpleNamespace(request_id=number, finished=True, prompt_ids=prompt)]


def test_replay_follows_the_clock():
    """Requests join when their time has come, the clock starts where it stands, an idle engine waits, order is kept."""
    engine, params = ScriptedEngine(), SamplingParams()
    asked = [(9.5, [5]), (0.0, [6]), (0.25, [7, 7]), (0.0, [8, 8, 8]), (9.0, [1, 2, 3, 4])]
    outputs = replay(engine, [TimedRequest(time, ids, params) for time, ids in asked])
    assert [list(output.prompt_ids) for output in outputs] == [ids for _, ids in asked]
    # Both at 0 first, the one at 0.25 after the step that it arrived in; the refused one at 9 makes nobody wait.
    added = [("add", 100.0, 100.0), ("add", 100.0, 100.0), ("add", 100.25, 101.0)]
    assert engine.log == [*added, ("wait", 109.0), ("wait", 109.5), ("add", 109.5, 109.5)]
    assert [output.finished for output in outputs] == [True] * 5
    assert outputs[4] == Refusal((1, 2, 3, 4), "prompt of 4 tokens does not fit") and outputs[4].outputs == ()


def test_replay_of_nothing_and_of_a_busy_engine():
    engine = ScriptedEngine()
    assert replay(engine, []) == [] and engine.log == []
    engine.add_request([1], SamplingParams(), 100.0)
    with pytest.raises(ValueError, match="replay needs an idle engine"):
        replay(engine, [])
