"""What travels between a prefill and a decode process: keys and values, layer by layer, while prefill goes on.

For each step of the prefill engine, in this order, over `torch.distributed`:

    [1]                    requests in the step, or GOODBYE
    [requests, 3]          the front's id of each, its first token in this step, its tokens in this step
    [2, T, kv_heads, D]    once a layer, as soon as the layer has it: keys and values of all T tokens of the step
    [requests]             the token drawn for each, or GOODBYE where the prompt is not complete yet

Sending layer by layer hides most of the transfer behind the layers that are still to be computed (Patel et al., 2024,
section IV). Messages go through the host's memory and gloo; servers with several GPUs use NCCL or RDMA instead.
"""

from __future__ import annotations

import contextlib
import queue
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from minillm.request import Step
from minillm.runner import ModelRunner

PREFILL, DECODE = 0, 1  # ranks
GOODBYE = -1


@dataclass(frozen=True)
class Transfer:
    """One step's keys and values on their way: tokens, bytes, and two times in seconds.

    `seconds` is the whole step. `waited` is the part of it after the model was done, in which the last messages left:
    what layer by layer could not hide.
    """

    tokens: int
    bytes: int
    seconds: float
    waited: float


@dataclass(frozen=True)
class Computed:
    """A prompt that has arrived: `kv` [n_layers, 2, T, n_kv_heads, head_dim], its first new token, and when."""

    job: int
    kv: torch.Tensor
    token: int
    moment: float


class SendingView:
    """Wraps a step's cache view: what a layer stores is also sent to the decode process, and nobody waits for it."""

    def __init__(self, view):
        self.view, self.sending = view, []

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Shapes as in `PagedView.attend`."""
        message = torch.stack((k, v)).cpu()  # [2, T, n_kv_heads, D]; kept until it is sent
        self.sending.append((dist.isend(message, DECODE), message))
        return self.view.attend(layer, q, k, v)


class PrefillRunner(ModelRunner):
    """Runs prompts and sends what it computes; `jobs` has the front's id of each of the engine's requests."""

    def __init__(self, model, config):
        super().__init__(model, config)
        self.jobs: dict[int, int] = {}
        self.last: Transfer | None = None

    def execute(self, step: Step) -> list[list[int]]:
        """As `ModelRunner.execute`; `last` tells what was sent. Raises RuntimeError if the other side is gone."""
        start = self.now()
        rows = [
            [self.jobs[request.id], request.num_computed_tokens, count]
            for request, count in zip(step.requests, step.counts, strict=True)
        ]
        dist.send(torch.tensor([len(rows)]), DECODE)
        dist.send(torch.tensor(rows), DECODE)
        drawn = super().execute(step)
        computed = self.now()
        for work, _ in self.sent.sending:
            work.wait()
        done = self.now()
        dist.send(torch.tensor([tokens[0] if tokens else GOODBYE for tokens in drawn]), DECODE)
        size = sum(message.nbytes for _, message in self.sent.sending)
        self.last = Transfer(sum(step.counts), size, done - start, done - computed)
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


def receive(arrivals: queue.Queue, layers: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A thread of the decode process: puts a `Computed` into `arrivals` for each prompt, and an error if one ends it.

    `shape` is (n_kv_heads, head_dim). Returns at GOODBYE.
    """
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
                    arrivals.put(Computed(job, torch.cat(parts.pop(job), 2), token, time.perf_counter()))
    except Exception as error:
        arrivals.put(error)


def waiting_in(arrivals: queue.Queue, seconds: float) -> list:
    """Everything that is there; at least one thing if it comes within that time."""
    found = []
    with contextlib.suppress(queue.Empty):
        found.append(arrivals.get(timeout=seconds) if seconds else arrivals.get_nowait())
    return found + [arrivals.get_nowait() for _ in range(arrivals.qsize())]
