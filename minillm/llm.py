"""The front door: `LLM("tiny").generate(["Once upon a time"])`. Text in, text out, many prompts in one engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minillm.config import EngineConfig
from minillm.engine import Engine
from minillm.formats import CheckpointError
from minillm.model import Transformer
from minillm.request import RequestOutput
from minillm.runner import ModelRunner
from minillm.sampling import SamplingParams
from minillm.tokenizer import Tokenizer, load_tokenizer
from minillm.weights import load_model


class LLM:
    """A model ready to serve: `LLM("tiny").generate(["Once upon a time"])`.

    `model` is a name or path as for `load_model`, or a `Transformer`. The tokenizer is the model's own if there is one;
    without one, prompts are lists of token ids. Raises what `load_model` raises, and ValueError for a tokenizer that is
    none, or a device or dtype for a model that is there already.
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
        if not named and (device is not None or dtype is not None):
            raise ValueError(f"this model is on {model.device} in {model.dtype}: move it with model.to, or give a name")
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            raise ValueError(f"tokenizer must be a Tokenizer, for example from load_tokenizer, got {tokenizer!r}")
        if named and tokenizer is None:
            try:
                tokenizer = load_tokenizer(model)
            except CheckpointError as error:  # a shape with random weights has none: no matter until a text comes
                self._no_tokenizer = str(error)
        self.model = load_model(model, device, dtype) if named else model
        self.tokenizer, self.config = tokenizer, config
        self.engine = Engine(ModelRunner(self.model, config), config, tokenizer)
        self._newest: dict[int, RequestOutput | None] = {}  # of each request that `generate` or a `stream` waits for

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Serve all prompts, batched as the config says; the results in the order of the prompts.

        A prompt is a text or a list of token ids; `params` is one for all, or one each. Raises ValueError, before
        anything runs, for a prompt that cannot be served.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(prompts, (list, tuple)):
            raise ValueError(f"prompts must be a text, or a list of texts or of lists of token ids; got {prompts!r}")
        each = params if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} SamplingParams: give one for all, or one each")
        ids = []
        try:
            for number, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
                try:
                    ids.append(self._add(prompt, wanted))
                except ValueError as error:
                    raise ValueError(f"prompt {number}: {error}") from error
            for id in ids:
                while self._newest[id] is None or not self._newest[id].finished:
                    self._step(id)
            return [self._newest[id] for id in ids]
        finally:
            self._leave(ids)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one answer, piece by piece: whole characters, and never the start of a stop string.

        Several streams may be read in turn: each step serves them all. Raises RuntimeError if a step failed.
        """
        if self.tokenizer is None:
            raise ValueError(f"no tokenizer ({self._no_tokenizer}), so no text to stream: use generate with token ids")
        if params is not None and getattr(params, "n", 1) != 1:
            raise ValueError(f"a stream is one sample, got n={params.n}")
        request_id, output, sent = self._add(prompt, params), None, 0
        try:
            while output is None or not output.finished:
                while self._newest[request_id] is output:  # unless a step of somebody else has brought more
                    self._step(request_id)
                output = self._newest[request_id]
                sample = output.outputs[0]
                if sample.error:
                    raise RuntimeError(sample.error)
                if len(sample.text) > sent:
                    yield sample.text[sent:]
                    sent = len(sample.text)
        finally:
            self._leave([request_id])  # if the reader stopped early

    def _add(self, prompt: str | Sequence[int], params: SamplingParams | None) -> int:
        request_id = self.engine.add_request(self._encode(prompt), params)
        self._newest[request_id] = None
        return request_id

    def _step(self, awaited: int) -> None:
        """One step for all. Raises RuntimeError if `awaited` has left the engine without coming here."""
        if not self.engine.is_unfinished(awaited):
            raise RuntimeError(f"request {awaited} was aborted, or taken by another caller of engine.step")
        self._collect()

    def _collect(self) -> None:
        for output in self.engine.step():
            if output.request_id in self._newest:
                self._newest[output.request_id] = output

    def _leave(self, ids: Sequence[int]) -> None:
        """Nobody waits for these any more: what is unfinished of them ends."""
        for id in ids:
            self.engine.abort(id)
            del self._newest[id]
        if not (self.engine.scheduler.running or self.engine.scheduler.waiting):
            self._collect()  # an abort that empties a static batch leaves others to be delivered; nothing runs

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError(f"no tokenizer ({self._no_tokenizer}): give prompts as lists of token ids")
        return self.tokenizer.encode(prompt)
