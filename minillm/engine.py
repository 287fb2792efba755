"""The engine: requests in, tokens out, one step at a time.

`Engine.step` asks the scheduler for a step, has a runner carry it out, and gives each request its tokens. The runner
is a `ModelRunner`, which runs the model, or a `SimulatedRunner`, which only charges the time that a step would take.
`LLM` is the front door: text in, text out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from minillm.formats import CheckpointError
from minillm.model import Transformer
from minillm.naive import check_prompt
from minillm.request import CompletionOutput, Request, RequestOutput, Status
from minillm.runner import ModelRunner, Runner
from minillm.sampling import SamplingParams
from minillm.scheduler import EngineConfig, Scheduler, Step
from minillm.tokenizer import Tokenizer, load_tokenizer
from minillm.weights import load_model


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
    """Serves requests that come and go, on the runner's clock. With `trace`, records every step in `.trace`."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig = EngineConfig(),  # noqa: B008, it is frozen
        tokenizer: Tokenizer | None = None,
        trace: bool = False,
    ):
        self.runner, self.config, self.tokenizer = runner, config, tokenizer
        self.scheduler = Scheduler(config, runner.config.max_context, runner.num_blocks)
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
        """Queue a prompt and return its id. `arrival` is on the runner's clock; None is now.

        Raises ValueError for a prompt or parameters that could never be served; nothing else is touched by that.
        """
        params = SamplingParams() if params is None else params
        check_prompt(prompt_ids, params, self.runner.config, several=True)
        arrival = self.runner.now() if arrival is None else arrival
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
        """
        request_id = self.add_request(prompt_ids, params, arrival)
        request = self._samples[request_id][0]
        request.received, request.num_received = kv, len(prompt_ids)
        if params.temperature:
            torch.rand(1, dtype=torch.float64, generator=request.generator)  # the number that drew the first token
        reason = request.append(token, now)
        if reason:
            self._end(request, reason)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step; returns every request that got a token or ended in it.

        If the runner raises, the requests of that step end with the reason "error", and the others go on.
        """
        began, start = time.perf_counter(), self.runner.now()
        step = self.scheduler.schedule()
        if not step.requests:
            return self._report()
        for request in step.requests:
            if request.timeline.scheduled is None:
                request.timeline.scheduled = start
        before = time.perf_counter()
        try:
            drawn = self.runner.execute(step)
        except BaseException as error:
            self._fail(step, error)
            if not isinstance(error, Exception):
                raise  # an interrupt: the engine is in order, and the caller decides
            return self._report()
        after = time.perf_counter()
        self._advance(step, drawn, self.runner.now())
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
        for request, count, tokens in zip(step.requests, step.counts, drawn, strict=True):
            self.scheduler.advance(request, count)
            if not tokens:
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
        for done in leaving:
            done.timeline.end = self.runner.now()
            self._changed[done.id] = None

    def _fail(self, step: Step, error: BaseException) -> None:
        """End the requests of a step that raised."""
        for request in step.requests:
            for sampled in [*request.samples, request]:
                sampled.error = f"{type(error).__name__}: {error}"
                self._end(sampled, "error")
                self._changed[sampled.id] = None

    def _report(self) -> list[RequestOutput]:
        """Everything that changed since the last report."""
        changed, self._changed = self._changed, {}
        return [self._output(id) for id in changed]

    def _output(self, request_id: int) -> RequestOutput:
        """A request as it stands; forgotten here once all of it is delivered."""
        samples = self._samples[request_id]
        finished = all(request.timeline.end is not None for request in samples)
        if finished:
            del self._samples[request_id]
        outputs = [
            CompletionOutput(r.index, r.stop.text[: r.stop.settled], r.output_ids, r.finish_reason, r.error, r.timeline)
            for r in samples
        ]
        return RequestOutput(request_id, samples[0].prompt_ids, outputs, finished)

    def _record(self, step: Step, start: float) -> None:
        self.stats["steps"] += 1
        self.stats["tokens"] += sum(step.counts)
        self.stats["preemptions"] += len(step.preempted)
        if self.trace is None:
            return
        pool, held = self.scheduler.pool, {}
        for request in [*self.scheduler.running, *self.scheduler.held]:
            for place, block in enumerate(request.block_table.blocks if request.block_table else ()):
                filled = min(pool.block_size, max(0, request.num_computed_tokens - place * pool.block_size))
                held[block] = max(filled, held.get(block, 0))
        work = [(r.id, r.index, count) for r, count in zip(step.requests, step.counts, strict=True)]
        used = pool.num_blocks - pool.num_free
        self.trace.append(StepRecord(start, self.runner.now(), work, used, sum(held.values())))


class LLM:
    """A model ready to serve: `LLM("tiny").generate(["Once upon a time"])`.

    `model` is a name or path as for `load_model`, or a `Transformer`. The tokenizer is the model's own if there is one;
    without one, prompts are lists of token ids. Raises what `load_model` raises.
    """

    def __init__(
        self,
        model: str | Transformer,
        config: EngineConfig = EngineConfig(),  # noqa: B008, it is frozen
        tokenizer: Tokenizer | None = None,
        device=None,
        dtype=None,
    ):
        named, self._no_tokenizer = not isinstance(model, Transformer), "none was given"
        if named and tokenizer is None:
            try:
                tokenizer = load_tokenizer(model)
            except CheckpointError as error:  # a shape with random weights has none: no matter until a text comes
                self._no_tokenizer = str(error)
        self.model = load_model(model, device, dtype) if named else model
        self.tokenizer, self.config = tokenizer, config
        self.engine = Engine(ModelRunner(self.model, config), config, tokenizer)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Serve all prompts, batched as the config says; the results in the order of the prompts.

        A prompt is a text or a list of token ids; `params` is one for all, or one each. Raises ValueError, before
        anything runs, for a prompt that cannot be served.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts and {len(each)} SamplingParams: give one for all, or one for each"
            )
        ids, done = [], {}
        try:
            for number, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
                try:
                    ids.append(self.engine.add_request(self._encode(prompt), wanted))
                except ValueError as error:
                    raise ValueError(f"prompt {number}: {error}") from error
            while not all(id in done for id in ids):
                done |= {output.request_id: output for output in self.engine.step() if output.finished}
        except BaseException:
            for id in ids:
                self.engine.abort(id)
            raise
        return [done[id] for id in ids]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one answer, piece by piece: whole characters, and never the start of a stop string."""
        if self.tokenizer is None:
            raise ValueError(f"no tokenizer ({self._no_tokenizer}), so no text to stream: use generate with token ids")
        params = SamplingParams() if params is None else params
        if params.n != 1:
            raise ValueError(f"a stream is one sample, got n={params.n}")
        request_id, sent, finished = self.engine.add_request(self._encode(prompt), params), 0, False
        try:
            while not finished:
                for output in self.engine.step():
                    if output.request_id == request_id:
                        text, finished = output.outputs[0].text, output.finished
                        if output.outputs[0].error:
                            raise RuntimeError(output.outputs[0].error)
                        if len(text) > sent:
                            yield text[sent:]
                            sent = len(text)
        finally:
            self.engine.abort(request_id)  # if the reader stopped early

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError(f"no tokenizer ({self._no_tokenizer}): give prompts as lists of token ids")
        return self.tokenizer.encode(prompt)
