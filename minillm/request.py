"""A request: what was asked for, how far it has come, and when things happened to it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minillm.paged_cache import BlockTable
from minillm.prefix_cache import Node
from minillm.sampling import SamplingParams, StopCondition


class Status(enum.Enum):
    """Waiting for memory and a place in the batch, running, or finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Timeline:
    """When things happened to one sample, in seconds on its engine's clock.

    `scheduled` is when its first step began, `token_times` when each token was ready. Of its prompt, `cached_tokens`
    were found in the prefix cache; `recomputed_tokens` had been computed before a preemption took them away.
    """

    arrival: float
    scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    end: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token, waiting included; None before there is one."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: the mean; None with fewer than two tokens."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: each token's time after the one before it."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def latency(self) -> float | None:
        """From arrival to the end; None while it runs."""
        return None if self.end is None else self.end - self.arrival


class Request:
    """One sample of one prompt. Its `num_computed_tokens` chase its `num_tokens`; when they meet, a token is drawn.

    Samples 1 to n - 1 of a prompt wait in `samples` of sample 0 until the prompt is computed, and then share its
    blocks. `id` is that of the request they belong to, in order of arrival.
    """

    def __init__(
        self,
        id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        arrival: float = 0.0,
        index: int = 0,
        eos_token_ids: Iterable[int] = (),
        tokenizer=None,
    ):
        self.id, self.index, self.params = id, index, params
        self.num_prompt_tokens = len(prompt_ids)
        self.token_ids = list(prompt_ids)  # the prompt and everything drawn so far
        self.num_computed_tokens = 0  # tokens whose keys and values are in the cache
        self.block_table: BlockTable | None = None  # while it runs
        self.prefix: Node | None = None  # the end of what it locks in the prefix cache, while it runs
        self.received = None  # keys and values of its first `num_received` tokens, if they were computed elsewhere
        self.num_received = 0
        self.overtaken = 0  # times that a later request was taken first
        self.status = Status.WAITING
        self.finish_reason: str | None = None  # "length", "stop", "abort" or "error"
        self.error: str | None = None
        self.samples: list[Request] = []
        self.timeline = Timeline(arrival)
        self.generator = params.make_generator(index)
        self.stop = StopCondition(params, eos_token_ids, tokenizer)

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens that were given."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_ids(self) -> list[int]:
        """The tokens that were drawn."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Tokens still to be computed before the next one can be drawn: 1 for a decode, more for a prompt."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_stored(self) -> int:
        """Tokens that its cache may ever hold: the last one drawn is never fed back."""
        return self.num_prompt_tokens + self.params.max_tokens - 1

    def append(self, token: int, now: float) -> str | None:
        """Add a token drawn at time `now`; "length" or "stop" if it is the last."""
        self.token_ids.append(token)
        self.timeline.token_times.append(now)
        return self.stop.add(token)

    @property
    def text(self) -> str:
        """What the output spells. While it runs, what could be the start of a stop string is held back."""
        return self.stop.text if self.finish_reason else self.stop.text[: self.stop.settled]

    def __repr__(self) -> str:
        return (
            f"Request({self.id}.{self.index}, {self.status.value}, {self.num_computed_tokens} of {self.num_tokens} "
            f"tokens computed)"
        )


@dataclass
class Step:
    """What one step does: `requests[i]` computes its next `counts[i]` tokens, and then draws `samples[i]`.

    samples is 0 in the middle of a prompt, 1 for a decode, n where a prompt of n samples ends. `copies` are the
    (source, target) blocks to copy first. `preempted` requests lost their blocks to older ones.
    """

    requests: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    def add(self, request: Request, count: int) -> None:
        """Grant `count` tokens."""
        self.requests.append(request)
        self.counts.append(count)
        self.samples.append(1 + len(request.samples) if count == request.num_missing else 0)


@dataclass
class CompletionOutput:
    """One sample as it stands. `finish_reason` is "length", "stop", "abort", "error", or None while it runs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    error: str | None
    timeline: Timeline


@dataclass
class RequestOutput:
    """A request as it stands: all of its samples. `finished` once the last one is done and delivered."""

    request_id: int
    prompt_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool

    @classmethod
    def of(cls, samples: Sequence[Request]) -> RequestOutput:
        """From the samples of one prompt."""
        outputs = [
            CompletionOutput(r.index, r.text, r.output_ids, r.finish_reason, r.error, r.timeline) for r in samples
        ]
        finished = all(request.timeline.end is not None for request in samples)
        return cls(samples[0].id, samples[0].prompt_ids, outputs, finished)

    @property
    def metrics(self) -> Timeline:
        """The timeline of the first sample; `.ttft` and `.tpot` in seconds."""
        return self.outputs[0].timeline
