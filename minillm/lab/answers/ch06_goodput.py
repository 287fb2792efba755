"""Chapter 6's goodput: the rate of requests that meet both targets, and what goes wrong in counting it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from minillm.lab.checks import Draw


def right_goodput(requests: Sequence[tuple[float, list[float]]], ttft: float, tpot: float, *, wrong="") -> float:
    """From the definitions of `minillm.metrics`; `wrong` names a slip to make."""
    good, tokens, counted = 0, 0, []
    for arrival, times in requests:
        first = times[0] - (0 if wrong == "clock" else arrival)
        gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
        pace = {
            "n": (times[-1] - times[0]) / len(times),
            "arrival": (times[-1] - arrival) / len(times),
            "worst": max(gaps, default=0.0),
            "median": statistics.median(gaps or [0.0]),
        }.get(wrong, sum(gaps) / len(gaps) if gaps else (math.inf if wrong == "single" else 0.0))
        kept = (first < ttft, pace < tpot) if wrong == "strictly" else (first <= ttft, pace <= tpot)
        met = any(kept) if wrong == "either" else kept[0] if wrong == "ttft" else all(kept)
        met = met or (wrong == "one token" and not gaps)
        good, tokens = good + met, tokens + met * len(times)
        counted += [(arrival, times)] * met
    starts, ends = [arrival for arrival, _ in requests], [times[-1] for _, times in requests]
    if counted and wrong.startswith("good"):  # a span over the good ones, or its start alone
        starts = [arrival for arrival, _ in counted]
        ends = [times[-1] for _, times in counted] if wrong == "good span" else ends
    begin = {"zero": 0.0, "first token": min(t[0] for _, t in requests), "order of arrival": starts[0]}
    span = (ends[-1] if wrong == "order" else max(ends)) - begin.get(wrong, min(starts))
    span = span or math.nan  # some slips have none
    return {"share": good / len(requests), "tokens": tokens / span}.get(wrong, good / span)


def goodput_cases(draw: Draw) -> Iterator[tuple]:
    """One request, each edge once, requests out of order; then at random. Times are multiples of 1/64, so exact."""
    yield [(1.0, [1.25, 1.5, 1.75])], 0.5, 0.5
    yield [(1.0, [1.5, 1.75, 2.0])], 0.5, 0.5  # on target to the bit
    yield [(1.0, [1.25, 1.5, 1.75])], 0.5, 0.25
    yield [(3.0, [3.25])], 0.5, 0.125
    yield [(2.0, [4.0, 4.25])], 1.0, 0.5  # one target met
    yield [(1.0, [3.0])], 1.0, 1.0
    yield [(5.0, [5.25, 9.0])], 0.5, 0.5
    yield [(1.0, [1.25, 1.5, 1.75, 3.75])], 0.5, 0.5  # the mean gap is over the target, the median is not
    yield [(1.0, [1.25, 1.375, 2.375, 3.375])], 0.5, 0.75  # the other way round
    yield [(8.0, [8.25, 8.5, 9.5])], 0.5, 0.4375  # two gaps, not three
    yield [(1.0, [2.0, 2.125, 2.25])], 1.5, 0.25
    yield [(8.0, [8.25, 8.5, 9.5])], 0.5, 0.75
    yield [(5.0, [5.25, 9.0]), (6.0, [6.5, 6.75, 7.0])], 0.5, 5.0
    yield [(0.0, [0.5, 1.0]), (1.0, [9.0, 9.5])], 1.0, 1.0  # the second came too late
    yield [(0.0, [4.0, 4.5]), (1.0, [1.5, 2.0])], 1.0, 1.0  # the first did
    yield [(5.0, [6.0]), (1.0, [2.0])], 9.0, 9.0  # the first to arrive is the last in the list
    for _ in range(20):
        arrival, requests = draw.randrange(64, 512) / 64, []
        for _ in range(draw.randrange(2, 8)):
            arrival += draw.randrange(64) / 64
            times = [arrival + draw.randrange(1, 96) / 64]
            for _ in range(draw.choice([0, 1, 4, 9])):
                times.append(times[-1] + draw.randrange(1, 64) / 64)
            requests.append((arrival, times))
        draw.shuffle(requests)  # nobody promised an order
        yield requests, draw.randrange(32, 96) / 64, draw.randrange(16, 48) / 64


def goodput_slip(slip: str) -> Callable:
    """`right_goodput` with one slip."""
    return lambda *case: right_goodput(*case, wrong=slip)


GOODPUT_MISTAKES = {  # what a single request can tell apart comes first
    "a single token has no gap, and meets any TPOT": goodput_slip("single"),
    "a request that is on target to the bit meets it": goodput_slip("strictly"),
    "n tokens have n - 1 gaps: divide by one less": goodput_slip("n"),
    "TPOT starts at the first token; what is before it is TTFT": goodput_slip("arrival"),
    "TPOT is the mean gap, not the largest": goodput_slip("worst"),
    "TPOT is the mean gap, not the median": goodput_slip("median"),
    "TPOT has a target too": goodput_slip("ttft"),
    "one token: TTFT still counts": goodput_slip("one token"),
    "a request must meet both targets, not one of them": goodput_slip("either"),
    "TTFT starts at the arrival of the request": goodput_slip("clock"),
    "the clock did not start at 0: count from the first arrival": goodput_slip("zero"),
    "the span starts at the first arrival, not at the first token": goodput_slip("first token"),
    "the first in the list need not be the first to arrive": goodput_slip("order of arrival"),
    "the last request in the list need not be the last to end": goodput_slip("order"),
    "the span goes over all requests, those that missed a target included": goodput_slip("good span"),
    "the first arrival counts, also where that request missed a target": goodput_slip("good start"),
    "that is the share of the requests; goodput is a rate: per second": goodput_slip("share"),
    "goodput counts requests, not tokens": goodput_slip("tokens"),
}
