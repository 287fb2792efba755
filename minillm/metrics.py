"""Metrics: what one request felt, and what the machine delivered, from the timelines of the outputs.

A sequence is one sample of one request. It arrives at time a, its tokens are ready at t_1 ... t_n, and it ends at e,
all in seconds on the runner's clock. e is t_n, except in a static batch, where all leave with the last of them.

- TTFT, time to first token: t_1 - a. Waiting in the queue is part of it.
- TPOT, time per output token after the first: (t_n - t_1) / (n - 1). One token has none, and meets any target.
- ITL, inter-token latency: each gap t_(i+1) - t_i, those of all sequences together. TPOT is one mean for each
  sequence and hides a stall; the tail of ITL shows it.
- latency: e - a. Normalized latency: latency / n, of which Orca (Yu et al., 2022, section 6.2) reports the median
  over the requests and vLLM (Kwon et al., 2023, section 6.1) the mean.
- makespan: from the first arrival to the last end.
- throughput: output tokens / makespan. `total_throughput` counts the prompts' tokens too, as the script of the
  Anyscale comparison does (Daniel et al., 2023); name it when you quote it, for it can be many times larger.
- goodput: requests that meet both targets, TTFT and TPOT, per second of makespan. Attainment: their share of all
  requests. DistServe (Zhong et al., 2024, section 1) calls goodput the highest rate of arrivals, per GPU, at which
  the attainment is still 90%: to find it, summarize runs at several rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from minillm.request import RequestOutput, Timeline
    from minillm.workload import Refusal

SERVED = ("length", "stop")  # the reasons to finish of a sequence that got all it asked for
COLUMNS = ("metric", "p50", "p90", "p99", "mean")


@dataclass(frozen=True)
class Percentiles:
    """Median, 90th and 99th percentile (linear between ranks, as numpy's default) and mean, in seconds.

    Of no values at all, every figure is NaN.
    """

    p50: float
    p90: float
    p99: float
    mean: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Percentiles of the values."""
        if not len(values):
            return cls(math.nan, math.nan, math.nan, math.nan)
        return cls(*np.percentile(values, [50, 90, 99]).tolist(), float(np.mean(values)))

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {seconds(getattr(self, field.name))}" for field in fields(self))


@dataclass(frozen=True)
class Summary:
    """What a run of many requests gave: counts, rates per second, and percentiles in seconds; see the module.

    `requests` were asked for, `served` of them to their end (each of their samples); only those are in the
    percentiles. Tokens of the others are not counted. `attainment` and `goodput` are None without targets.
    """

    requests: int
    served: int
    prompt_tokens: int
    output_tokens: int
    makespan: float
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    latency: Percentiles
    normalized_latency: Percentiles
    preemptions: int
    targets: tuple[float, float] | None = None
    attainment: float | None = None

    @property
    def throughput(self) -> float:
        """Output tokens per second of makespan."""
        return self.per_second(self.output_tokens)

    @property
    def total_throughput(self) -> float:
        """Output and prompt tokens per second of makespan."""
        return self.per_second(self.prompt_tokens + self.output_tokens)

    @property
    def request_rate(self) -> float:
        """Requests served per second of makespan."""
        return self.per_second(self.served)

    @property
    def goodput(self) -> float | None:
        """Requests per second of makespan that met both targets; None without targets."""
        return None if self.attainment is None else self.per_second(self.attainment * self.requests)

    def per_second(self, count: float) -> float:
        """The count over the makespan; 0 of nothing, and infinite where the clock stood still."""
        return count / self.makespan if self.makespan else math.inf if count else 0.0

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The percentiles as rows under `COLUMNS`, ready for a table."""
        names = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl", "latency": "latency"}
        names["latency per token"] = "normalized_latency"
        rows = []
        for label, name in names.items():
            figures = getattr(self, name)
            rows.append((label, *(seconds(getattr(figures, field.name)) for field in fields(figures))))
        return rows

    def __str__(self) -> str:
        made = f"{self.served} of {self.requests} requests served in {seconds(self.makespan)}: "
        made += f"{self.throughput:,.1f} output tokens/s ({self.total_throughput:,.1f} with prompts)"
        if self.targets:
            ttft, tpot = map(seconds, self.targets)
            made += f"\n{self.attainment:.1%} met TTFT {ttft} and TPOT {tpot}: goodput {self.goodput:.3g} requests/s"
        table = [COLUMNS, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        return "\n".join([made, *lines])


def summarize(
    outputs: Iterable[RequestOutput | Refusal], ttft: float | None = None, tpot: float | None = None
) -> Summary:
    """Summary of finished outputs (of `replay`, or gathered from `Engine.step`).

    `ttft` and `tpot` are the targets in seconds, given together or not at all. A request counts as served when every
    sample of it ended with "length" or "stop"; refused, aborted and failed ones miss every target. Each of the n
    samples of a request is a sequence of its own; the prompt counts once. Raises ValueError for no outputs, for an
    output that is not finished, for one target without the other and for a target that is not positive.
    """
    outputs = list(outputs)
    targets = check_targets(ttft, tpot)
    if not outputs:
        raise ValueError("there is nothing to summarize: no outputs")
    for place, output in enumerate(outputs):
        if output is None or not output.finished:
            raise ValueError(f"output {place} is not finished: summarize takes finished outputs")
    served = [o for o in outputs if o.outputs and all(sample.finish_reason in SERVED for sample in o.outputs)]
    lines = [sample.timeline for output in served for sample in output.outputs]
    met = sum(all(meets(s.timeline, *targets) for s in output.outputs) for output in served) if targets else 0
    return Summary(
        requests=len(outputs),
        served=len(served),
        prompt_tokens=sum(len(output.prompt_ids) for output in served),
        output_tokens=sum(len(line.token_times) for line in lines),
        makespan=max(line.end for line in lines) - min(line.arrival for line in lines) if lines else 0.0,
        ttft=Percentiles.of([line.ttft for line in lines]),
        tpot=Percentiles.of([line.tpot for line in lines if line.tpot is not None]),
        itl=Percentiles.of([gap for line in lines for gap in line.itl]),
        latency=Percentiles.of([line.latency for line in lines]),
        normalized_latency=Percentiles.of([line.latency / len(line.token_times) for line in lines]),
        preemptions=sum(line.preemptions for line in lines),
        targets=targets,
        attainment=met / len(outputs) if targets else None,
    )


def meets(line: Timeline, ttft: float, tpot: float) -> bool:
    """Whether a sequence stays within both targets, in seconds; a single token meets any TPOT."""
    return line.ttft <= ttft and (line.tpot is None or line.tpot <= tpot)


def check_targets(ttft: float | None, tpot: float | None) -> tuple[float, float] | None:
    """The pair, None if there is none; ValueError for half a pair, or a target that is not a positive number."""
    if ttft is None and tpot is None:
        return None
    for name, target in (("ttft", ttft), ("tpot", tpot)):
        if target is None:
            raise ValueError(f"targets come in pairs: {name} is missing")
        if not isinstance(target, (int, float)) or isinstance(target, bool) or not target > 0:
            raise ValueError(f"the target {name} must be a positive number of seconds, got {target!r}")
    return ttft, tpot


def seconds(value: float) -> str:
    """Three significant digits with a unit, "none" for NaN: "1.23 s", "45.6 ms", "7.00 µs"."""
    if math.isnan(value):
        return "none"
    unit, scale = next(((u, s) for u, s in (("s", 1), ("ms", 1e-3)) if abs(value) >= 0.9995 * s), ("µs", 1e-6))
    shown = value / scale
    return f"{shown:,.{0 if abs(shown) >= 99.95 else 1 if abs(shown) >= 9.995 else 2}f} {unit}"
