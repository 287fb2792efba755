"""The engine: requests in, tokens out, one step at a time.

`Engine.step` asks the scheduler for a step, has a runner carry it out, and gives each request its tokens. The runner
is a `ModelRunner` or a `SimulatedRunner`, which only charges a step's time. `minillm.llm` has the front door.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minillm.config import EngineConfig
from minillm.naive import check_prompt
from minillm.request import Request, RequestOutput, Status
from minillm.runner import Runner
from minillm.sampling import SamplingParams
from minillm.scheduler import Scheduler, Step
from minillm.tokenizer import Tokenizer


@dataclass
class StepRecord:
    """What one step did: from `start` to `end`, in seconds on the runner's clock.

    `requests` are (id, sample, tokens) of every request in it. `used_blocks` of the pool were in use after it, and
    `stored_tokens` keys and values in them, each shared one counted once.
    """

    start: float
    end: float
    requests: list[tuple[int, int, int]]
    used_blocks: int
    stored_tokens: int


class Engine:
    """Serves requests that come and go, on the runner's clock. With `trace`, records every step in `.trace`.

    Raises ValueError for a config with other blocks than the runner's cache has.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig = EngineConfig(),  # noqa: B008, it is frozen
        tokenizer: Tokenizer | None = None,
        trace: bool = False,
    ):
        self.scheduler = Scheduler(config, runner.config.max_context, runner.num_blocks)
        size = getattr(runner, "block_size", config.block_size)  # a simulated runner has no cache, and takes any
        if size != config.block_size:
            raise ValueError(f"block_size is {config.block_size} in this config and {size} in the runner's: use one")
        self.runner, self.config, self.tokenizer = runner, config, tokenizer
        self.trace: list[StepRecord] | None = [] if trace else None
        self.stats = {"steps": 0, "tokens": 0, "preemptions": 0, "runner_seconds": 0.0, "seconds": 0.0}
        self._samples: dict[int, list[Request]] = {}  # of every request that is not delivered
        self._changed: dict[int, None] = {}  # ids to report at the end of this step, in order
        self._next_id = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still waits, runs or is to be delivered."""
        return bool(self._samples)

    def add_request(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, arrival: float | None = None
    ) -> int:
        """Queue a prompt and return its id. `arrival` is on the runner's clock and not in the future; None is now.

        Raises ValueError for a prompt or parameters that could never be served; nothing else is touched by that.
        """
        params = SamplingParams() if params is None else params
        check_prompt(prompt_ids, params, self.runner.config, several=True)
        now = self.runner.now()
        arrival = now if arrival is None else arrival
        if not isinstance(arrival, (int, float)) or not float("-inf") < arrival <= now:
            raise ValueError(f"arrival must be a moment up to now, {now:.3f} s on the runner's clock; got {arrival!r}")
        self.scheduler.check_samples(params.n)  # before that many are made
        eos = self.runner.config.eos_token_ids
        first, *others = [
            Request(self._next_id, prompt_ids, params, arrival, index, eos, self.tokenizer) for index in range(params.n)
        ]
        first.samples = others
        self.scheduler.add(first)
        self._samples[first.id] = [first, *others]
        self._next_id += 1
        return first.id

    def add_computed(
        self, prompt_ids: Sequence[int], params: SamplingParams, kv, token: int, now: float, arrival: float
    ) -> int:
        """Queue a prompt whose keys and values `kv` were computed elsewhere, and its first token, drawn at `now`.

        `kv` is whatever the runner makes of it; `DecodeRunner` wants [n_layers, 2, T, n_kv_heads, head_dim].
        Raises what `add_request` does, and ValueError for more than one sample: only one first token has come.
        """
        if params.n != 1:
            raise ValueError(f"n={params.n}: a prompt that was computed elsewhere goes on as one sample")
        request_id = self.add_request(prompt_ids, params, arrival)
        request = self._samples[request_id][0]
        request.received, request.num_received = kv, len(prompt_ids)
        if params.temperature:
            torch.rand(1, dtype=torch.float64, generator=request.generator)  # the number that drew the first token
        reason = request.append(token, now)
        if reason:
            self._end(request, reason)
        return request_id

    def is_unfinished(self, request_id: int) -> bool:
        """Whether this request still waits, runs or is to be delivered."""
        return request_id in self._samples

    def step(self) -> list[RequestOutput]:
        """Run one step; returns every request that got a token or ended in it.

        If anything in it raises, the requests of that step end with the reason "error", and the others go on.
        """
        began, start = time.perf_counter(), self.runner.now()
        step = self.scheduler.schedule()
        if not step.requests:
            return self._report()
        for request in step.requests:
            if request.timeline.scheduled is None:
                request.timeline.scheduled = start
        working = [sample for request in step.requests for sample in [*request.samples, request]]
        before = time.perf_counter()
        try:
            drawn = self.runner.execute(step)
            after = time.perf_counter()
            self._advance(step, drawn, self.runner.now())
        except BaseException as error:
            self._fail(working, error)
            if not isinstance(error, Exception):
                raise  # an interrupt: the engine is in order, and the caller decides
            return self._report()
        self._record(step, start)
        outputs = self._report()
        self.stats["runner_seconds"] += after - before
        self.stats["seconds"] += time.perf_counter() - began
        return outputs

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request now, with the tokens it has; returns it as it ended, or None if it is not there any more."""
        if request_id not in self._samples:
            return None
        for request in self._samples[request_id]:
            if request.status is not Status.FINISHED:
                self._end(request, "abort")
        self._changed.pop(request_id, None)
        return self._output(request_id)

    def _advance(self, step: Step, drawn: list[list[int]], now: float) -> None:
        """Give each request of a step its tokens."""
        for request, count, samples, tokens in zip(step.requests, step.counts, step.samples, drawn, strict=True):
            self.scheduler.advance(request, count)
            if not samples:
                continue
            drawing = [request, *request.samples]
            if request.samples:
                self.scheduler.fork(request)
            for sampled, token in zip(drawing, tokens, strict=True):
                self._changed[sampled.id] = None
                reason = sampled.append(token, now)
                if reason:
                    self._end(sampled, reason)

    def _end(self, request: Request, reason: str) -> None:
        """Finish one sample, and note the time for all that leave with it."""
        first = self._samples[request.id][0]
        if request in first.samples:  # its prompt is not computed yet: the scheduler does not know it
            first.samples.remove(request)
            request.status, request.finish_reason = Status.FINISHED, reason
            leaving = [request]
        else:
            leaving = self.scheduler.finish(request, reason)
        now = self.runner.now()
        for done in leaving:
            done.timeline.end = now
            self._changed[done.id] = None

    def _fail(self, working: list[Request], error: BaseException) -> None:
        """End the samples of a step that raised, but for those whose last token came before that."""
        for sampled in working:
            self._changed[sampled.id] = None
            if sampled.status is not Status.FINISHED:
                sampled.error = f"{type(error).__name__}: {error}"
                self._end(sampled, "error")

    def _report(self) -> list[RequestOutput]:
        """Everything that changed since the last report."""
        changed, self._changed = self._changed, {}
        return [self._output(id) for id in changed]

    def _output(self, request_id: int) -> RequestOutput:
        """A request as it stands; forgotten here once all of it is delivered."""
        samples = self._samples[request_id]
        output = RequestOutput.of(samples)
        if output.finished:
            del self._samples[request_id]
        return output

    def _record(self, step: Step, start: float) -> None:
        self.stats["steps"] += 1
        self.stats["tokens"] += sum(step.counts)
        self.stats["preemptions"] += len(step.preempted)
        if self.trace is None:
            return
        work = [(r.id, r.index, count) for r, count in zip(step.requests, step.counts, strict=True)]
        used, stored = self.scheduler.used_blocks, self.scheduler.stored_tokens
        self.trace.append(StepRecord(start, self.runner.now(), work, used, stored))
