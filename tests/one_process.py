"""Prefill and decode in one process: both sides of `minillm.kv_transfer` over a list instead of a network."""

import queue
from dataclasses import replace

import torch

from minillm import kv_transfer
from minillm.engine import Engine
from minillm.kv_transfer import GOODBYE, DecodeRunner, PrefillRunner, receive


class Wire:
    """Stands in for `torch.distributed`: what one side sends, the other receives in the same order."""

    def __init__(self, monkeypatch):
        self.sent: list[torch.Tensor] = []
        monkeypatch.setattr(kv_transfer.dist, "send", lambda message, rank: self.sent.append(message.clone()))
        monkeypatch.setattr(kv_transfer.dist, "isend", self.isend)
        monkeypatch.setattr(kv_transfer.dist, "recv", self.recv)

    def isend(self, message, rank):
        assert rank == kv_transfer.DECODE
        self.sent.append(message.clone())
        return type("Work", (), {"wait": lambda self: None})()

    def recv(self, target, rank):
        assert rank == kv_transfer.PREFILL
        if not self.sent:
            raise RuntimeError("connection closed")
        message = self.sent.pop(0)
        assert (message.shape, message.dtype) == (target.shape, target.dtype)
        target.copy_(message)


def prefill(model, prompts, params, config):
    """Compute all prompts and send them, GOODBYE at the end; the engine's preemptions."""
    runner = PrefillRunner(model, config)
    engine = Engine(runner, config)
    for job, prompt in enumerate(prompts):
        only_first = replace(params, max_tokens=1, ignore_eos=True)
        runner.jobs[engine.add_request(prompt, only_first)] = 100 + job
    while engine.has_unfinished:
        assert all(output.outputs[0].error is None for output in engine.step())
    kv_transfer.dist.send(torch.tensor([GOODBYE]), kv_transfer.DECODE)
    return engine.stats["preemptions"]


def arrived(model) -> list:
    """Everything that `receive` makes of what is on the wire."""
    arrivals = queue.Queue()
    receive(arrivals, model.config.n_layers, (model.config.n_kv_heads, model.config.head_dim), model.dtype)
    return [arrivals.get_nowait() for _ in range(arrivals.qsize())]


def decode(model, prompts, params, config, arrivals):
    """The tokens of each prompt. The cache is full of NaN where nothing was put."""
    runner, done = DecodeRunner(model, config), {}
    runner.cache.k.fill_(torch.nan)
    runner.cache.v.fill_(torch.nan)
    engine = Engine(runner, config)
    names = {}
    for ready in arrivals:
        prompt = prompts[ready.job - 100]
        names[engine.add_computed(prompt, params, ready.kv, ready.token, ready.moment, 0.0)] = ready.job - 100
    while engine.has_unfinished:
        done |= {names[out.request_id]: out.outputs[0].token_ids for out in engine.step() if out.finished}
        engine.scheduler.check()
    return [done[number] for number in range(len(prompts))]
