"""Workloads: who asks for what, and when; and `replay`, which feeds a workload to an engine on its own clock.

A workload is a list of `TimedRequest`. `make_workload` draws one from three parts: lengths of prompts, lengths of
outputs, and times of arrival, each of them a function (random generator, count) -> array. All is seeded, and the
three parts have streams of their own: another rate keeps the same requests, so that two runs differ in one thing.

Published traces are not shipped. Where a paper states only the mean of its lengths, a log-normal with that mean stands
in, its tail assumed. Requests that share their start are `Session`s: `make_sessions` draws, `converse` runs them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minillm.sampling import SamplingParams

if TYPE_CHECKING:
    from minillm.engine import Engine
    from minillm.request import RequestOutput

Draw = Callable[[np.random.Generator, int], np.ndarray]  # (generator, count) -> [count] lengths, or arrival times
LONGEST = 2**31  # a tail beyond this would overflow an integer before any limit could refuse it
REDRAWS = 1000  # rounds of rejection sampling before a limit counts as out of reach


@dataclass(frozen=True)
class TimedRequest:
    """One request of a workload: `arrival` in seconds after the start, the prompt, and what is asked for.

    Raises ValueError for an arrival that is negative or not finite, and for an empty prompt.
    """

    arrival: float
    prompt_ids: Sequence[int]
    params: SamplingParams

    def __post_init__(self):
        if not is_number(self.arrival) or self.arrival < 0:
            raise ValueError(f"arrival must be 0 or more seconds, got {self.arrival!r}")
        if not len(self.prompt_ids):
            raise ValueError("prompt_ids must hold at least one token, got none")
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))


@dataclass(frozen=True)
class Refusal:
    """What `replay` returns for a request that the engine did not take: the request, and the engine's reason.

    It has the fields of a finished output that produced nothing, so that both can be walked alike.
    """

    prompt_ids: tuple[int, ...]
    reason: str
    outputs: tuple = ()
    finished: bool = True
    metrics: None = None


@dataclass(frozen=True)
class Session:
    """A conversation or program: each prompt is all that came before, answers included, and the turn's own tokens.

    `arrival` in seconds after the start; a turn follows at once on the answer before it.
    """

    turns: tuple[tuple[int, ...], ...]
    params: SamplingParams
    arrival: float = 0.0

    def __post_init__(self):
        if not self.turns:
            raise ValueError("a session needs at least one turn, got none")


def fixed(length: int) -> Draw:
    """Every length the same."""
    check_length("length", length)
    return lambda generator, count: np.full(count, length)


def uniform(low: int, high: int) -> Draw:
    """Any length from `low` to `high`, both included, equally likely. Orca's trace (Yu et al., 2022, section 6.2)
    has prompts uniform(32, 512) and outputs uniform(1, 128)."""
    check_length("low", low)
    check_length("high", high, least=low)
    return lambda generator, count: generator.integers(low, high, count, endpoint=True)


def capped_exponential(mean: float, cap: int) -> Draw:
    """Exponential lengths of that mean, rounded; what is above `cap` is drawn again, so the true mean is lower.

    The widely varying outputs of the Anyscale experiment (Daniel et al., 2023: mean 128, cap 32 to 1,536) and its
    script's `capped_exponential`, except that a length of 0 becomes 1.
    """
    check_positive("mean", mean)
    check_length("cap", cap)
    return redraw(lambda generator, count: generator.exponential(mean, count), cap)


def log_normal(mean: float, sigma: float = 1.0, cap: int | None = None) -> Draw:
    """Lengths whose logarithm is normal with standard deviation `sigma`, rounded, at least 1: many short, some long.

    `mean` is that of the uncut distribution; what is above `cap` is drawn again. The median is
    mean * exp(-sigma**2 / 2). No paper that we replay states a sigma: 1.0 is our assumption.
    """
    check_positive("mean", mean)
    check_positive("sigma", sigma)
    if cap is not None:
        check_length("cap", cap)
    mu = math.log(mean) - sigma**2 / 2
    return redraw(lambda generator, count: generator.lognormal(mu, sigma, count), cap)


def burst(generator: np.random.Generator, count: int) -> np.ndarray:
    """Arrivals: everything at second 0."""
    return np.zeros(count)


def poisson(rate: float) -> Draw:
    """Arrivals: `rate` requests a second on average, independent of each other; the gaps are exponential."""
    check_positive("rate", rate)
    return lambda generator, count: np.cumsum(generator.exponential(1.0, count)) / rate


def make_workload(
    count: int,
    prompts: Draw,
    outputs: Draw,
    vocab_size: int,
    arrivals: Draw = burst,
    params: SamplingParams | None = None,
    max_total: int | None = None,
    seed: int = 0,
) -> list[TimedRequest]:
    """`count` requests in order of arrival: random token ids below `vocab_size`, a set number of output tokens each.

    `params` is a pattern (greedy if None): each request gets it with its own `max_tokens`, and with `ignore_eos`,
    so that the length asked for is the length produced. A pair whose prompt and output exceed `max_total` tokens
    together (a model's context, say) is drawn again. The same seed gives the same workload, whatever the arrivals.
    Raises ValueError for a number that makes no sense, for lengths that are no distribution, and where `max_total` is
    out of reach.
    """
    check_length("count", count)
    check_length("vocab_size", vocab_size)
    check_length("seed", seed, least=0)
    for name, draw in (("prompts", prompts), ("outputs", outputs), ("arrivals", arrivals)):
        if not callable(draw):
            raise ValueError(f"{name} must be a distribution, such as fixed(5) or uniform(1, 9); got {draw!r}")
    for_times, for_lengths, for_tokens = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))

    def draw_pairs(generator: np.random.Generator, count: int) -> np.ndarray:
        return np.stack([prompts(generator, count), outputs(generator, count)], axis=1)

    pairs = draw_pairs(for_lengths, count)
    if max_total is not None:
        check_length("max_total", max_total, least=2)
        reject(pairs, lambda pairs: pairs.sum(axis=1) > max_total, draw_pairs, for_lengths, f"max_total {max_total}")
    pattern = replace(params or SamplingParams(temperature=0), ignore_eos=True)
    requests = []
    for arrival, (prompt, output) in zip(arrivals(for_times, count).tolist(), pairs.tolist(), strict=True):
        tokens = for_tokens.integers(vocab_size, size=prompt).tolist()
        requests.append(TimedRequest(arrival, tokens, replace(pattern, max_tokens=output)))
    return sorted(requests, key=lambda request: request.arrival)


def replay(engine: Engine, requests: Sequence[TimedRequest]) -> list[RequestOutput | Refusal]:
    """Run a workload to its end on the engine's clock, real or virtual; outputs in the order of `requests`.

    Second 0 of the workload is now. A request is added as soon as its time has come, between two steps; an idle
    engine waits for the next one. Where the engine refuses a request (ValueError), its place holds a `Refusal` and
    the others go on. Raises ValueError if the engine has unfinished requests of its own.
    """
    each = [Session((request.prompt_ids,), request.params, request.arrival) for request in requests]
    return [outputs[0] for outputs in converse(engine, each)]


def make_sessions(
    count: int, own: Draw, outputs: Draw, vocab_size: int, *, shared: int = 0, groups: int = 1, turns: int = 1,
    copies: int = 1, arrivals: Draw = burst, seed: int = 0,
) -> list[Session]:  # fmt: skip
    """`count` sessions of `turns` turns, each with tokens of its `own`; the first turn starts with `shared` others.

    There are `groups` different shared starts, which take turns. `copies` sessions in a row are equal, as samples of
    one prompt that are asked for one by one. All answers of a session have one length. Greedy, random tokens.
    Raises ValueError for a number that is not a positive integer; `shared` and `seed` may be 0.
    """
    sizes = {"count": count, "vocab_size": vocab_size, "groups": groups, "turns": turns, "copies": copies}
    for name, value in [*sizes.items(), ("shared", shared), ("seed", seed)]:
        check_length(name, value, least=1 if name in sizes else 0)
    for_times, for_lengths, for_tokens = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    different = -(-count // copies)
    lengths = own(for_lengths, different * turns).reshape(different, turns).tolist()
    limits = outputs(for_lengths, different).tolist()
    starts = for_tokens.integers(vocab_size, size=(groups, shared)).tolist()
    made = []
    for number, (each, limit) in enumerate(zip(lengths, limits, strict=True)):
        first, *later = (tuple(for_tokens.integers(vocab_size, size=length).tolist()) for length in each)
        params = SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True)
        made.append(Session(((*starts[number % groups], *first), *later), params))
    times = np.sort(arrivals(for_times, count)).tolist()
    return [replace(made[place // copies], arrival=time) for place, time in enumerate(times)]


def programs(unit: int) -> dict[str, dict]:
    """Arguments of `make_sessions` for kinds of programs of Zheng et al. (2024, section 6.1), and for nothing shared.

    `unit` tokens scale the lengths. 64 gives the chat its published 256 to 512 a turn; the rest is our assumption.
    """
    return {
        "few-shot": {"shared": 10 * unit, "own": uniform(unit, 2 * unit), "outputs": fixed(1)},
        "chat": {"own": uniform(4 * unit, 8 * unit), "outputs": uniform(4, 8), "turns": 4},
        "agent": {"shared": 12 * unit, "own": uniform(2 * unit, 3 * unit), "outputs": fixed(unit), "turns": 5},
        "samples": {"own": fixed(16 * unit), "outputs": fixed(2 * unit), "copies": 8},
        "nothing shared": {"own": uniform(8 * unit, 12 * unit), "outputs": fixed(2 * unit)},
    }


def converse(engine: Engine, sessions: Sequence[Session]) -> list[list[RequestOutput | Refusal]]:
    """Run sessions to their end on the engine's clock; the outputs of each, turn by turn.

    A session of which the engine refuses a turn ends with that `Refusal`. Raises ValueError if the engine is busy.
    """
    if engine.has_unfinished:
        raise ValueError("replay needs an idle engine; this one has unfinished requests")
    start, results = engine.runner.now(), [[] for _ in sessions]
    due = sorted((start + session.arrival, place) for place, session in enumerate(sessions))  # sorted, so a heap
    places: dict[int, int] = {}  # which session each of the engine's ids belongs to
    past: list[list[int]] = [[] for _ in sessions]
    while due or engine.has_unfinished:
        while due and due[0][0] <= engine.runner.now():
            moment, place = heapq.heappop(due)
            prompt = [*past[place], *sessions[place].turns[len(results[place])]]
            try:
                places[engine.add_request(prompt, sessions[place].params, arrival=moment)] = place
            except ValueError as error:
                results[place].append(Refusal(tuple(prompt), str(error)))
        if due and not engine.has_unfinished:
            engine.runner.wait_until(due[0][0])
        for output in engine.step() if engine.has_unfinished else ():
            if output.finished:
                place = places.pop(output.request_id)
                results[place].append(output)
                if len(results[place]) < len(sessions[place].turns):
                    past[place] = [*output.prompt_ids, *output.outputs[0].token_ids]
                    heapq.heappush(due, (engine.runner.now(), place))
    return results


def redraw(draw: Draw, cap: int | None) -> Draw:
    """`draw` rounded to whole lengths from 1 to `cap`: what rounds to 0 becomes 1, what is above is drawn again."""

    def whole(generator: np.random.Generator, count: int) -> np.ndarray:
        return np.clip(np.rint(draw(generator, count)), 1, LONGEST).astype(np.int64)

    def below_cap(generator: np.random.Generator, count: int) -> np.ndarray:
        lengths = whole(generator, count)
        if cap is not None:
            reject(lengths, lambda lengths: lengths > cap, whole, generator, f"cap {cap}")
        return lengths

    return below_cap


def reject(drawn: np.ndarray, too_long: Callable, draw: Draw, generator: np.random.Generator, limit: str) -> None:
    """Draw again, in place, until nothing is too long. Raises ValueError naming the limit if that takes for ever."""
    for _ in range(REDRAWS):
        bad = too_long(drawn)
        if not bad.any():
            return
        drawn[bad] = draw(generator, int(bad.sum()))
    raise ValueError(f"{limit} is out of reach: {REDRAWS} rounds of drawing again left {bad.sum()} draws above it")


def check_length(name: str, value: int, least: int = 1) -> None:
    """Raises ValueError unless the value is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_positive(name: str, value: float) -> None:
    """Raises ValueError unless the value is a positive finite number."""
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")


def is_number(value) -> bool:
    """True for a finite real number; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# (prompt lengths, output lengths) with the means that Kwon et al. (2023, figure 11) give for their two traces. Cut at
# max_total=2048, the context of OPT, the first pair's means fall to about 157 and 304.
SHAREGPT_LIKE = (log_normal(161.31), log_normal(337.99))
ALPACA_LIKE = (log_normal(19.31), log_normal(58.45))
