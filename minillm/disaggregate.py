"""Disaggregation: one process computes prompts, another decodes (Zhong et al., 2024; Patel et al., 2024).

The two phases no longer get into each other's way, and each can have the hardware that suits it. The price is that the
keys and values of every prompt travel: `minillm.kv_transfer` says how.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from minillm.config import EngineConfig
from minillm.engine import Engine
from minillm.kv_transfer import DECODE, GOODBYE, PREFILL, DecodeRunner, PrefillRunner, Transfer, receive, waiting_in
from minillm.naive import check_prompt
from minillm.request import CompletionOutput, Request, RequestOutput, Timeline
from minillm.sampling import SamplingParams
from minillm.scheduler import Scheduler
from minillm.tokenizer import load_tokenizer
from minillm.weights import load_model, read_config

WAIT = 0.01  # seconds that an idle decode process sleeps between two looks at its mail


@dataclass(frozen=True)
class Job:
    """A request on its way to both workers; `id` is the front's own, `arrival` on the clock that processes share."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    arrival: float


@dataclass(frozen=True)
class Setting:
    """What both workers need to know; `devices` has one for each."""

    model: str
    config: EngineConfig
    dtype: object
    devices: tuple[str, str]
    threads: int | None
    rendezvous: str


def prefill_worker(inbox, say: Callable[[object], None], setting: Setting) -> None:
    """Compute prompts until None comes. Raises, and so ends, when the decode process is gone."""
    runner = PrefillRunner(load_model(setting.model, setting.devices[PREFILL], setting.dtype), setting.config)
    engine, open_ = Engine(runner, setting.config), True
    say("ready")
    while open_ or engine.has_unfinished:
        while open_ and not (engine.has_unfinished and inbox.empty()):
            job = inbox.get()
            open_ = job is not None
            if not open_:
                break
            # One token ends it here; whether that token ends the request is for the decode process to say.
            only_first = replace(job.params, max_tokens=1, stop=(), stop_token_ids=(), ignore_eos=True)
            runner.jobs[engine.add_request(job.prompt_ids, only_first, job.arrival)] = job.id
        for output in engine.step():
            if output.outputs[0].error:
                raise RuntimeError(output.outputs[0].error)
            del runner.jobs[output.request_id]
        say(runner.last)
    dist.send(torch.tensor([GOODBYE]), DECODE)


def decode_worker(inbox, say: Callable[[object], None], setting: Setting) -> None:
    """Decode what arrives until None has come and all is done; lost prompts end with the reason "error"."""
    model = load_model(setting.model, setting.devices[DECODE], setting.dtype)
    engine, jobs, computed, names = Engine(DecodeRunner(model, setting.config), setting.config), {}, {}, {}
    arrivals, shape = queue.Queue(), (model.config.n_kv_heads, model.config.head_dim)
    expected = (arrivals, model.config.n_layers, shape, model.dtype)
    (receiver := threading.Thread(target=receive, args=expected, daemon=True)).start()
    say("ready")
    lost, open_ = None, True
    while open_ or jobs or engine.has_unfinished:
        while open_ and not inbox.empty():
            job = inbox.get()
            open_ = job is not None
            jobs |= {job.id: job} if open_ else {}
        for arrival in waiting_in(arrivals, 0 if engine.has_unfinished else WAIT):
            if isinstance(arrival, Exception):
                lost = arrival
            else:
                computed[arrival.job] = arrival
        for id in sorted(jobs.keys() & computed.keys()):
            job, ready = jobs.pop(id), computed.pop(id)
            added = engine.add_computed(job.prompt_ids, job.params, ready.kv, ready.token, ready.moment, job.arrival)
            names[added] = id
        outputs = engine.step()
        if outputs:
            say("alive")
        for output in outputs:
            if output.finished:
                say(replace(output, request_id=names.pop(output.request_id)))
        if lost is not None:
            for id in list(jobs):
                say(failed(jobs.pop(id), f"the prefill process is lost: {lost}"))
    receiver.join(timeout=5)  # until GOODBYE: the other side is still saying it


def failed(job: Job, reason: str) -> RequestOutput:
    """What a request gets whose worker died."""
    timeline = Timeline(job.arrival, end=time.perf_counter())
    return RequestOutput(job.id, job.prompt_ids, [CompletionOutput(0, "", [], "error", reason, timeline)], True)


def work(rank: int, inbox, say: Callable[[object], None], setting: Setting) -> None:
    """One of the two processes, from its first word to its last."""
    if setting.threads:
        torch.set_num_threads(setting.threads)
    if setting.rendezvous.startswith("file"):  # both are on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # A worker may wait for its next prompt as long as it likes. It hears at once when the other side dies.
    rendezvous = {"init_method": setting.rendezvous, "rank": rank, "world_size": 2, "timeout": timedelta(days=1)}
    dist.init_process_group("gloo", **rendezvous)
    (prefill_worker if rank == PREFILL else decode_worker)(inbox, say, setting)
    dist.destroy_process_group()


def spawned(rank: int, inbox, line: connection.Connection, setting: Setting) -> None:
    """`work` in a process that `Disaggregated` started: it leaves when the front does, however that ends."""

    def leave_with_front() -> None:
        connection.wait([mp.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_front, daemon=True).start()
    work(rank, inbox, line.send, setting)


class Disaggregated:
    """A prefill and a decode process on this machine. Closed by `close`, or as a context manager.

    `model` is as for `load_model`; `timeout` seconds without a sign of life end what is unfinished; `devices` are those
    of the two processes. `transfers` grows by one entry for each prefill step. Text, stop strings and `n > 1` are for
    `LLM`: a prompt is token ids, with one answer. Raises ValueError for a bad setting, RuntimeError for no start.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig = EngineConfig(),  # noqa: B008, it is frozen
        dtype=None,
        timeout: float = 60.0,
        threads: int | None = 1,
        devices: tuple[str, str] = ("cpu", "cpu"),
    ):
        if not isinstance(config, EngineConfig):
            raise ValueError(f"config must be an EngineConfig, got {config!r}")
        if config.batching != "continuous":
            raise ValueError(f'batching must be "continuous" in both processes, got {config.batching!r}')
        if isinstance(devices, str) or len(devices) != 2 or isinstance(timeout, str) or not timeout > 0:
            raise ValueError(f"there must be two devices and a timeout above 0, got {devices!r} and {timeout!r}")
        self.config, self.timeout, self._next_id = read_config(model), timeout, 0
        self.transfers: list[Transfer] = []
        config = replace(config, prefix_caching=False)
        blocks = config.num_blocks or -(-self.config.max_context // config.block_size)
        self._door = Scheduler(config, self.config.max_context, blocks)
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        setting = Setting(model, config, dtype, devices, threads, f"file://{self._folder.name}/rendezvous")
        self._inboxes, self.workers, self._lines = [context.Queue(), context.Queue()], [], []
        for rank in (PREFILL, DECODE):
            ours, theirs = context.Pipe(duplex=False)  # not a queue: its end tells that a process is gone
            worker = context.Process(target=spawned, args=(rank, self._inboxes[rank], theirs, setting), daemon=True)
            worker.start()
            self.workers.append(worker)
            theirs.close()
            self._lines.append(ours)
        if not all(map(self._is_ready, self._lines)):
            self.close()
            raise RuntimeError("the prefill and the decode process did not start")

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None) -> list[RequestOutput]:
        """Serve all prompts; outputs in their order. A worker that dies ends the requests it had with "error".

        Raises ValueError, before anything runs, for a prompt that cannot be served.
        """
        if not self._inboxes:
            raise ValueError("this pair is closed: make a new one")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        if params.stop:
            raise ValueError(f"stop strings {list(params.stop)} need a tokenizer: use stop_token_ids here")
        for number, prompt in enumerate(prompts):
            try:
                check_prompt(prompt, params, self.config)
                self._door.add(Request(number, prompt, params))
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
            finally:
                self._door.waiting.clear()
        first, self._next_id = self._next_id, self._next_id + len(prompts)
        jobs = {first + i: Job(first + i, list(p), params, time.perf_counter()) for i, p in enumerate(prompts)}
        for job in jobs.values():
            self._inboxes[DECODE].put(job)
            self._inboxes[PREFILL].put(job)
        done: dict[int, RequestOutput] = {}
        while len(done) < len(jobs):
            if (heard := self._hear()) is None:
                break
            if isinstance(heard, RequestOutput) and heard.request_id in jobs:
                done[heard.request_id] = heard
        return [done.get(id) or failed(job, "a worker is lost, or silent") for id, job in jobs.items()]

    def _is_ready(self, line: connection.Connection) -> bool:
        """Whether a worker has loaded its model and found the other."""
        try:
            return line.poll(self.timeout) and line.recv() == "ready"
        except EOFError:
            return False

    def _hear(self) -> object | None:
        """The next word of a worker; None when the decode process is gone, or after `timeout` seconds of silence."""
        while self._lines[DECODE] is not None:
            ready = connection.wait([line for line in self._lines if line is not None], self.timeout)
            if not ready:
                return None
            try:
                heard = ready[0].recv()
            except (EOFError, OSError):  # that process is gone
                self._lines[self._lines.index(ready[0])] = None
                continue
            if isinstance(heard, Transfer):
                self.transfers.append(heard)
            return heard
        return None

    def close(self) -> None:
        """End both processes, at once if they do not end by themselves. To close twice does nothing."""
        inboxes, self._inboxes = self._inboxes, []
        for inbox in inboxes:
            inbox.put(None)
        for worker in self.workers:
            worker.join(timeout=2)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for inbox in inboxes:  # what nobody read any more must not keep this process from ending
            inbox.cancel_join_thread()
            inbox.close()
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
    parser.add_argument("--devices", nargs=2, default=("cpu", "cpu"), help="of the prefill and the decode process")
    asked = parser.parse_args(arguments)
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error("start two processes: torchrun --nproc-per-node 2 -m minillm.disaggregate ...")
    tokenizer, params = load_tokenizer(asked.model), SamplingParams(max_tokens=asked.max_tokens, temperature=0)
    config, inbox = replace(EngineConfig(), prefix_caching=False), queue.Queue()
    for id, prompt in enumerate(asked.prompts):
        ids = tokenizer.encode(prompt)
        check_prompt(ids, params, read_config(asked.model))
        inbox.put(Job(id, ids, params, time.perf_counter()))
    inbox.put(None)

    def show(word: object) -> None:
        if isinstance(word, RequestOutput):
            print(asked.prompts[word.request_id] + tokenizer.decode(word.outputs[0].token_ids), flush=True)

    work(int(os.environ["RANK"]), inbox, show, Setting(asked.model, config, None, tuple(asked.devices), None, "env://"))


if __name__ == "__main__":
    main(sys.argv[1:])
