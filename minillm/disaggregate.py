"""Disaggregation: one process computes prompts, another decodes (Zhong et al., 2024; Patel et al., 2024).

The two phases no longer get into each other's way, and each can have the hardware that suits it. The price is that the
keys and values of every prompt travel. They are sent layer by layer while the layers above are still being
computed, so that most of the transfer hides behind the prefill.

    from minillm.disaggregate import Disaggregated
    with Disaggregated("tiny") as llm:
        outputs = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))

    torchrun --nproc-per-node 2 -m minillm.disaggregate tiny "Once upon a time" "It was"
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from minillm.engine import Engine
from minillm.naive import check_prompt
from minillm.request import CompletionOutput, RequestOutput, Timeline
from minillm.runner import ModelRunner
from minillm.sampling import SamplingParams
from minillm.scheduler import EngineConfig, Step
from minillm.tokenizer import load_tokenizer
from minillm.weights import load_model, read_config

PREFILL, DECODE = 0, 1  # ranks
GOODBYE = -1


@dataclass(frozen=True)
class Job:
    """A request on its way to both workers; `id` is the front's own, `arrival` on the clock that processes share."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    arrival: float


class SendingView:
    """Wraps a step's cache view: what a layer stores is also sent to the decode process, and nobody waits for it."""

    def __init__(self, view):
        self.view, self.sending = view, []

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Shapes as in `PagedView.attend`."""
        message = torch.stack((k, v)).contiguous()  # [2, T, n_kv_heads, D]; kept until it is sent
        self.sending.append((dist.isend(message, DECODE), message))
        return self.view.attend(layer, q, k, v)


class PrefillRunner(ModelRunner):
    """Runs prompts, and sends what it computes: a header, keys and values of every layer, the tokens drawn."""

    jobs: dict[int, int] = {}  # the front's id of each of the engine's requests

    def execute(self, step: Step) -> list[list[int]]:
        """As `ModelRunner.execute`."""
        rows = [
            [self.jobs[request.id], request.num_computed_tokens, count]
            for request, count in zip(step.requests, step.counts, strict=True)
        ]
        dist.send(torch.tensor([len(rows)]), DECODE)
        dist.send(torch.tensor(rows), DECODE)
        drawn = super().execute(step)
        for work, _ in self.sent.sending:
            work.wait()
        dist.send(torch.tensor([tokens[0] if tokens else GOODBYE for tokens in drawn]), DECODE)
        return drawn

    def view(self, step: Step) -> SendingView:
        """The view of this step, which sends."""
        self.sent = SendingView(super().view(step))
        return self.sent


class DecodeRunner(ModelRunner):
    """Puts keys and values that came from elsewhere into the cache before a request's first step."""

    @torch.inference_mode()
    def execute(self, step: Step) -> list[list[int]]:
        """As `ModelRunner.execute`."""
        for request in step.requests:
            if request.received is not None:  # [n_layers, 2, T, n_kv_heads, D]
                slots = torch.tensor(request.block_table.slots(0, request.received.shape[2]), device=self.model.device)
                blocks, places = slots // self.cache.block_size, slots % self.cache.block_size
                keys, values = request.received.to(self.model.device).unbind(1)
                self.cache.v[:, blocks.unique()] = 0  # as `PagedView` does: no NaN behind the last token
                self.cache.k[:, blocks, :, places] = keys.transpose(0, 1)
                self.cache.v[:, blocks, :, places] = values.transpose(0, 1)
                request.received = None
        return super().execute(step)


def prefill_worker(inbox, outbox, name, config: EngineConfig, dtype) -> None:
    """Compute prompts until None comes. Raises, and so ends, when the decode process is gone."""
    runner = PrefillRunner(load_model(name, "cpu", dtype), replace(config, prefix_caching=False))
    engine, open_ = Engine(runner, replace(config, prefix_caching=False)), True
    outbox.put(("ready", PREFILL))
    while open_ or engine.has_unfinished:
        while open_ and not (engine.has_unfinished and inbox.empty()):
            job = inbox.get()
            if job is None:
                open_ = False
                break
            # One token ends it here; whether that token ends the request is for the decode process to say.
            only_first = replace(job.params, max_tokens=1, stop=(), stop_token_ids=(), ignore_eos=True)
            runner.jobs[engine.add_request(job.prompt_ids, only_first, job.arrival)] = job.id
        for output in engine.step():
            if output.outputs[0].error:
                raise RuntimeError(output.outputs[0].error)
    dist.send(torch.tensor([GOODBYE]), DECODE)


def receive(arrivals: queue.Queue, layers: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A thread of the decode process: collect keys and values, hand a prompt over when its first token is there."""
    parts: dict[int, list[torch.Tensor]] = {}
    try:
        while True:
            dist.recv(count := torch.zeros(1, dtype=torch.int64), PREFILL)
            if count.item() == GOODBYE:
                return
            dist.recv(rows := torch.zeros(count.item(), 3, dtype=torch.int64), PREFILL)
            counts = rows[:, 2].tolist()
            step = torch.empty(layers, 2, sum(counts), *shape, dtype=dtype)
            for layer in step:
                dist.recv(layer, PREFILL)
            dist.recv(tokens := torch.zeros(len(rows), dtype=torch.int64), PREFILL)
            for (job, start, _), part, token in zip(rows.tolist(), step.split(counts, 2), tokens.tolist(), strict=True):
                if start == 0:
                    parts[job] = []  # also after a preemption, which computes the prompt anew
                parts[job].append(part)
                if token != GOODBYE:
                    arrivals.put((job, torch.cat(parts.pop(job), 2), token, time.perf_counter()))
    except Exception as error:
        arrivals.put(error)


def decode_worker(inbox, outbox, name, config: EngineConfig, dtype) -> None:
    """Decode what arrives until None has come and all is done; lost prompts end with the reason "error"."""
    config = replace(config, prefix_caching=False)
    model = load_model(name, "cpu", dtype)
    engine, jobs, names, arrivals = Engine(DecodeRunner(model, config), config), {}, {}, queue.Queue()
    shape = (model.config.n_kv_heads, model.config.head_dim)
    threading.Thread(target=receive, args=(arrivals, model.config.n_layers, shape, model.dtype), daemon=True).start()
    outbox.put(("ready", DECODE))
    lost, open_ = None, True
    while open_ or jobs or engine.has_unfinished:
        while open_ and not inbox.empty():
            job = inbox.get()
            open_ = job is not None
            if job is not None:
                jobs[job.id] = job
        try:
            arrived = arrivals.get(timeout=0 if engine.has_unfinished else 0.01)
        except queue.Empty:
            arrived = None
        if isinstance(arrived, Exception):
            lost = arrived
        elif arrived is not None and arrived[0] in jobs:
            job = jobs.pop(arrived[0])
            names[engine.add_computed(job.prompt_ids, job.params, *arrived[1:], arrival=job.arrival)] = job.id
        elif arrived is not None:
            arrivals.put(arrived)  # its job has not been read yet
        for output in engine.step():
            outbox.put(("output", replace(output, request_id=names[output.request_id])))
        if lost is not None:
            for job in list(jobs.values()):
                outbox.put(("output", failed(jobs.pop(job.id), f"the prefill process is lost: {lost}")))


def failed(job: Job, reason: str) -> RequestOutput:
    """What a request gets whose worker died."""
    timeline = Timeline(job.arrival, end=time.perf_counter())
    return RequestOutput(job.id, job.prompt_ids, [CompletionOutput(0, "", [], "error", reason, timeline)], True)


def work(rank: int, inboxes, outbox, rendezvous: str, name, config: EngineConfig, dtype, threads: int | None) -> None:
    """A worker process. Everything it says goes through loopback or the network of `torch.distributed`."""
    if threads:
        torch.set_num_threads(threads)
    if rendezvous.startswith("file"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=timedelta(days=1))
    (prefill_worker if rank == PREFILL else decode_worker)(inboxes[rank], outbox, name, config, dtype)
    dist.destroy_process_group()


class Disaggregated:
    """A prefill and a decode process on this machine. Closed by `close`, or as a context manager.

    `model` is a name or path as for `load_model`; `timeout` seconds without a sign of life end what is unfinished.
    Text, stop strings and `n > 1` are for `LLM`: here a prompt is a list of token ids and gets one answer.
    Raises RuntimeError if the workers do not start.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig = EngineConfig(),  # noqa: B008, it is frozen
        dtype=None,
        timeout: float = 60.0,
        threads: int | None = 1,
    ):
        self.config, self.timeout, self._next_id = read_config(model), timeout, 0
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._inboxes, self._outbox = [context.Queue(), context.Queue()], context.Queue()
        rendezvous = f"file://{self._folder.name}/rendezvous"
        arguments = (self._inboxes, self._outbox, rendezvous, model, config, dtype, threads)
        self.workers = [context.Process(target=work, args=(r, *arguments), daemon=True) for r in (PREFILL, DECODE)]
        for worker in self.workers:
            worker.start()
        for _ in self.workers:
            if self._hear() is None:
                self.close()
                raise RuntimeError("the prefill and the decode process did not start")

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None) -> list[RequestOutput]:
        """Serve all prompts; outputs in their order. A worker that dies ends the requests it had with "error".

        Raises ValueError, before anything runs, for a prompt that cannot be served.
        """
        params = SamplingParams() if params is None else params
        if params.stop:
            raise ValueError(f"stop strings {list(params.stop)} need a tokenizer: use stop_token_ids here")
        for number, prompt in enumerate(prompts):
            try:
                check_prompt(prompt, params, self.config)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
        first, self._next_id = self._next_id, self._next_id + len(prompts)
        jobs = {first + i: Job(first + i, list(p), params, time.perf_counter()) for i, p in enumerate(prompts)}
        for job in jobs.values():
            for inbox in (self._inboxes[DECODE], self._inboxes[PREFILL]):
                inbox.put(job)
        done: dict[int, RequestOutput] = {}
        while len(done) < len(jobs):
            output = self._hear()
            if output is None:
                break
            if output.finished and output.request_id in jobs:
                done[output.request_id] = output
        return [done.get(id) or failed(job, "a worker is lost, or silent") for id, job in jobs.items()]

    def _hear(self):
        """The next message; None when the decode process is gone, or nobody has spoken for `timeout` seconds."""
        deadline = time.perf_counter() + self.timeout
        while time.perf_counter() < deadline:
            try:
                return self._outbox.get(timeout=0.1)[1]
            except queue.Empty:
                if not self.workers[DECODE].is_alive():
                    return None
        return None

    def close(self) -> None:
        """End both processes, at once if they do not end by themselves."""
        for inbox in self._inboxes:
            inbox.put(None)
        for worker in self.workers:
            worker.join(timeout=2)
            if worker.is_alive():
                worker.kill()
                worker.join()
        self._folder.cleanup()

    def __enter__(self) -> Disaggregated:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def main(arguments: list[str]) -> None:
    """One worker of two that `torchrun` starts: both are given the prompts, and the decode process prints."""
    parser = argparse.ArgumentParser(prog="torchrun --nproc-per-node 2 -m minillm.disaggregate")
    parser.add_argument("model", help="a name or path as for load_model")
    parser.add_argument("prompts", nargs="+", help="texts to go on with")
    parser.add_argument("--max-tokens", type=int, default=32)
    asked = parser.parse_args(arguments)
    tokenizer, params = load_tokenizer(asked.model), SamplingParams(max_tokens=asked.max_tokens, temperature=0)
    inboxes, outbox = [queue.Queue(), queue.Queue()], queue.Queue()
    rank = int(os.environ["RANK"])
    for id, prompt in enumerate(asked.prompts):
        inboxes[rank].put(Job(id, tokenizer.encode(prompt), params, time.perf_counter()))
    inboxes[rank].put(None)
    work(rank, inboxes, outbox, "env://", asked.model, EngineConfig(), None, None)
    while rank == DECODE and not outbox.empty():
        kind, output = outbox.get()
        if kind == "output" and output.finished:
            print(asked.prompts[output.request_id] + tokenizer.decode(output.outputs[0].token_ids))


if __name__ == "__main__":
    main(sys.argv[1:])
