"""Timing: warm up, repeat, report the median and the spread, and take turns when two things are compared.

A single run measures the machine's mood as much as the code. The median of several runs ignores a
hiccup, the quartiles say how much to trust it, and taking turns (A B A B) lets a slow minute hit both
sides alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def format_seconds(seconds: float) -> str:
    """Three significant digits and a unit: "1.23 ms", "45.6 µs", "12.0 s"."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    for scale, unit in UNITS:
        # 0.9995 of a unit would print as 1000 of the next smaller one.
        if abs(seconds) >= 0.9995 * scale or unit == "ns":
            break
    value = seconds / scale
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"


def quartiles(values: tuple[float, ...]) -> tuple[float, float]:
    """Lower and upper quartile (the inclusive method); one value is both."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True)
class Timing:
    """Seconds of each run, in the order they were taken, warm-up left out."""

    seconds: tuple[float, ...]
    label: str | None = None

    @property
    def median(self) -> float:
        """Median of the runs, in seconds."""
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        """Lower quartile, in seconds: a quarter of the runs were faster."""
        return quartiles(self.seconds)[0]

    @property
    def high(self) -> float:
        """Upper quartile, in seconds: a quarter of the runs were slower."""
        return quartiles(self.seconds)[1]

    def __str__(self) -> str:
        name = f"{self.label}: " if self.label else ""
        low, high = format_seconds(self.low), format_seconds(self.high)
        return f"{name}{format_seconds(self.median)} (middle half of {len(self.seconds)} runs: {low} to {high})"


@dataclass(frozen=True)
class Ratio:
    """How many times faster one function ran than the baseline.

    Median and quartiles of the ratios taken round by round: a slow minute hits both sides of a round.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}× ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Comparison:
    """Timings of functions that took turns; the first name is the baseline."""

    timings: dict[str, Timing]

    def __getitem__(self, name: str) -> Timing:
        return self.timings[name]

    @property
    def baseline(self) -> str:
        """Name that the speed-ups refer to: the first one given."""
        return next(iter(self.timings))

    def speedup(self, name: str, over: str | None = None) -> Ratio:
        """How many times faster `name` is than `over` (the baseline if None). ValueError on an unknown name."""
        over = self.baseline if over is None else over
        for asked in (name, over):
            if asked not in self.timings:
                raise ValueError(f"nothing called {asked!r} was timed; there are {', '.join(self.timings)}")
        slow, fast = self.timings[over], self.timings[name]
        rounds = tuple(a / b for a, b in zip(slow.seconds, fast.seconds, strict=True))
        return Ratio(statistics.median(rounds), *quartiles(rounds))

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, time, speed-up over the baseline) of each function, ready to print."""
        return [
            (
                name,
                f"{format_seconds(timing.median)} ({format_seconds(timing.low)} to {format_seconds(timing.high)})",
                "baseline" if name == self.baseline else str(self.speedup(name)),
            )
            for name, timing in self.timings.items()
        ]

    def __str__(self) -> str:
        return "\n".join(f"{name}: {seconds}, {ratio}" for name, seconds, ratio in self.rows())

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        from minillm.lab.tables import table

        rounds = len(self.timings[self.baseline].seconds)
        caption = f"Median of {rounds} rounds taken in turn; in brackets, the middle half."
        return table(self.rows(), ["what", "time", "times faster"], caption)._repr_mimebundle_()


def time_once(function: Callable[[], object], device: str | torch.device | None = None) -> float:
    """Seconds of one call: CUDA events on a GPU, which the GPU itself stamps, else the machine's clock."""
    if device is not None and torch.device(device).type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000  # elapsed_time is in milliseconds
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def measure(
    function: Callable[[], object],
    *,
    repeats: int = 5,
    warmup: int = 1,
    device: str | torch.device | None = None,
    label: str | None = None,
) -> Timing:
    """Time `function()` `repeats` times after `warmup` calls that are not counted.

    `device` "cuda" times the work queued on the GPU; None and "cpu" time the call. Raises ValueError
    if `repeats` is below 1 or `warmup` below 0.
    """
    check_counts(repeats, warmup)
    for _ in range(warmup):
        function()
    return Timing(tuple(time_once(function, device) for _ in range(repeats)), label)


def compare(
    functions: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warmup: int = 1,
    device: str | torch.device | None = None,
) -> Comparison:
    """Time several functions in turn, A B A B, `repeats` rounds after `warmup` rounds that are not counted.

    The first name is the baseline of the speed-ups. Raises ValueError with fewer than two functions,
    `repeats` below 1 or `warmup` below 0.
    """
    check_counts(repeats, warmup)
    if len(functions) < 2:
        raise ValueError(f"compare needs two functions or more, got {list(functions)}")
    for _ in range(warmup):
        for function in functions.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            seconds[name].append(time_once(function, device))
    return Comparison({name: Timing(tuple(taken), name) for name, taken in seconds.items()})


def check_counts(repeats: int, warmup: int) -> None:
    """Raise ValueError unless there is at least one counted run."""
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    if warmup < 0:
        raise ValueError(f"warmup must be 0 or more, got {warmup}")
