"""Metrics against times written down by hand, numpy's percentiles, and what must hold for any run."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.metrics import COLUMNS, Percentiles, meets, summarize
from minillm.request import CompletionOutput, RequestOutput, Timeline
from minillm.workload import Refusal


def output(arrival, *samples, prompt=4, reason="length", finished=True, end=None):
    """A finished output whose samples' tokens appeared at the given times."""
    outputs = []
    for index, times in enumerate(samples):
        line = Timeline(arrival, times[0] if times else None, list(times), end or (times[-1] if times else arrival))
        outputs.append(CompletionOutput(index, "", [5] * len(times), reason, None, line))
    return RequestOutput(0, [1] * prompt, outputs, finished)


# Arrives at 10, tokens at 12, 13 and 16; arrives at 11, tokens at 12 and 12.5; arrives at 15, one token at 15.25.
THREE = [output(10.0, (12, 13, 16)), output(11.0, (12, 12.5), prompt=7), output(15.0, (15.25,), prompt=1)]


def test_three_requests_by_hand():
    summary = summarize(THREE, ttft=1.5, tpot=1.0)
    assert (summary.requests, summary.served, summary.prompt_tokens, summary.output_tokens) == (3, 3, 12, 6)
    assert summary.makespan == 6.0  # 10 to 16
    assert summary.throughput == 1.0 and summary.total_throughput == 3.0 and summary.request_rate == 0.5
    assert summary.ttft.p50 == 1.0 and summary.ttft.mean == pytest.approx((2 + 1 + 0.25) / 3)
    assert summary.tpot.mean == (2.0 + 0.5) / 2 and summary.tpot.p50 == 1.25  # the single token has none
    assert summary.itl.p50 == 1.0 and summary.itl.mean == pytest.approx((1 + 3 + 0.5) / 3)
    assert summary.latency.p50 == 1.5 and summary.latency.mean == pytest.approx((6 + 1.5 + 0.25) / 3)
    assert summary.normalized_latency.mean == pytest.approx((2 + 0.75 + 0.25) / 3)
    # The first misses both targets, the second meets both, and a single token meets any TPOT.
    assert summary.attainment == 2 / 3 and summary.goodput == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    "ttft, tpot, met",
    [(2.0, 2.0, 3), (2.0, 1.999, 2), (1.999, 2.0, 2), (1.0, 0.5, 2), (0.999, 0.5, 1), (0.2, 9, 0), (9, 1e-9, 1)],
)
def test_a_target_is_met_at_its_very_value_and_both_must_be(ttft, tpot, met):
    summary = summarize(THREE, ttft, tpot)
    assert summary.attainment == pytest.approx(met / 3) and summary.goodput == pytest.approx(met / 6)
    assert sum(meets(o.outputs[0].timeline, ttft, tpot) for o in THREE) == met


def test_a_static_batch_is_late_for_the_short_one():
    """Tokens at 1 and 2 but delivered at 8: TTFT and TPOT are those of the tokens, latency that of the delivery."""
    summary = summarize([output(0.0, (1, 2), end=8.0)])
    assert summary.ttft.p50 == 1 and summary.tpot.p50 == 1 and summary.latency.p50 == 8
    assert summary.normalized_latency.p50 == 4 and summary.makespan == 8 and summary.throughput == 2 / 8


def test_those_not_served_miss_and_count_nowhere_else():
    """Aborted, failed and refused requests lower the attainment; their tokens and times are left out."""
    failed = [output(0.0, (1, 2, 3), reason="abort"), output(0.0, (), reason="error"), Refusal((1, 2), "too long")]
    alone, among = (summarize(outputs, 1.5, 1.0) for outputs in (THREE, THREE + failed))
    assert (among.requests, among.served) == (6, 3)
    assert among.attainment == alone.attainment / 2 and among.goodput == alone.goodput
    for name in ("prompt_tokens", "output_tokens", "makespan", "ttft", "tpot", "itl", "latency", "throughput"):
        assert getattr(among, name) == getattr(alone, name), name


def test_nothing_served():
    summary = summarize([Refusal((1, 2), "too long")], 1.0, 1.0)
    assert summary.served == 0 and summary.throughput == summary.goodput == summary.attainment == 0
    assert summarize([output(1.0, (1.0,))]).throughput == math.inf  # a token in no time at all
    assert math.isnan(summary.ttft.p50) and "0 of 1 requests served" in str(summary) and "none" in str(summary)


def test_samples_are_sequences_and_their_request_meets_only_with_all():
    """E18's kin: two samples of one prompt; the prompt counts once, and one slow sample spoils the request."""
    both = output(0.0, (1, 2), (1, 4), prompt=9)
    summary = summarize([both], ttft=1.0, tpot=1.0)
    assert (summary.requests, summary.prompt_tokens, summary.output_tokens) == (1, 9, 4)
    assert summary.tpot.mean == 2.0 and summary.attainment == 0
    assert summarize([both], ttft=1.0, tpot=3.0).attainment == 1
    half = output(0.0, (1, 2), (1, 4))
    half.outputs[1].finish_reason = "abort"
    assert summarize([half]).served == 0


times = st.lists(st.floats(0.001, 50), min_size=1, max_size=8)


@given(st.lists(st.tuples(st.floats(0, 100), times), min_size=1, max_size=12), st.floats(0.01, 60), st.floats(0.01, 60))
def test_any_run_against_numpy(run, ttft, tpot):
    """Random gaps after random arrivals: percentiles are numpy's, rates are counts over the makespan."""
    ready = [(arrival, (arrival + np.cumsum(gaps)).tolist()) for arrival, gaps in run]
    summary = summarize([output(arrival, tokens, prompt=3) for arrival, tokens in ready], ttft, tpot)
    first = [tokens[0] - arrival for arrival, tokens in ready]
    rest = [(t[-1] - t[0]) / (len(t) - 1) if len(t) > 1 else -math.inf for _, t in ready]
    gaps = np.concatenate([np.diff(t) for _, t in ready])
    for figures, values in ((summary.ttft, first), (summary.tpot, [x for x in rest if x > -1]), (summary.itl, gaps)):
        if len(values):
            expected = [*np.quantile(values, [0.5, 0.9, 0.99]), np.mean(values)]
            assert [figures.p50, figures.p90, figures.p99, figures.mean] == pytest.approx(expected)
        else:
            assert math.isnan(figures.p50) and math.isnan(figures.mean)
    makespan = max(t[-1] for _, t in ready) - min(arrival for arrival, _ in ready)
    total = sum(len(t) for _, t in ready)
    assert summary.throughput == pytest.approx(total / makespan)
    assert summary.total_throughput == pytest.approx((total + 3 * len(ready)) / makespan)
    both = sum(a <= ttft and b <= tpot for a, b in zip(first, rest, strict=True))
    assert summary.attainment == pytest.approx(both / len(ready))
    assert summary.goodput == pytest.approx(both / makespan) and summary.goodput <= summary.request_rate + 1e-12


def test_printed():
    """Figures with their units, one row a metric, and the goodput only where there are targets."""
    lines = str(summarize(THREE, ttft=1.5, tpot=0.25)).splitlines()
    assert lines[0] == "3 of 3 requests served in 6.00 s: 1.0 output tokens/s (3.0 with prompts)"
    assert lines[1] == "33.3% met TTFT 1.50 s and TPOT 250 ms: goodput 0.167 requests/s"
    assert lines[2].split() == list(COLUMNS)
    assert [line.split("  ")[0] for line in lines[3:]] == ["TTFT", "TPOT", "ITL", "latency", "latency per token"]
    assert lines[3].split() == ["TTFT", "1.00", "s", "1.80", "s", "1.98", "s", "1.08", "s"]
    assert "goodput" not in str(summarize(THREE)) and summarize(THREE).goodput is None
    rows = summarize([output(0.0, (0.0123, 0.0123456))]).rows()
    assert rows[0][1] == "12.3 ms" and rows[1][1] == "45.6 µs" and all(len(row) == len(COLUMNS) for row in rows)
    assert str(Percentiles.of([1, 2, 3])) == "p50 2.00 s, p90 2.80 s, p99 2.98 s, mean 2.00 s"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: summarize([]), "nothing to summarize"),
        (lambda: summarize([*THREE, output(0, (1,), finished=False)]), "output 3 is not finished"),
        (lambda: summarize([None]), "output 0 is not finished"),
        (lambda: summarize(THREE, ttft=1), "targets come in pairs: tpot is missing"),
        (lambda: summarize(THREE, tpot=1), "targets come in pairs: ttft is missing"),
        (lambda: summarize(THREE, 0, 1), "target ttft must be a positive number of seconds, got 0"),
        (lambda: summarize(THREE, 1, math.nan), "target tpot must be a positive number of seconds, got nan"),
        (lambda: summarize(THREE, 1, "1"), "target tpot must be a positive number of seconds, got '1'"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
