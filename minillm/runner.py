"""Carrying out a step: the model over a paged cache, on the machine's clock.

Everything that chapter 6 needs of the device is here. `minillm.simulate` has another runner with the same three
methods, which charges a step its roofline time instead.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from minillm.config import EngineConfig, ModelConfig
from minillm.model import Transformer
from minillm.paged_cache import PagedCache, PagedView
from minillm.sampling import sample
from minillm.scheduler import Step

CACHE_BYTES = 2 * 2**30  # what a CPU's pool takes at most, if nothing else is said
GPU_SHARE = 0.8  # of the memory that is free on a GPU


class Runner(Protocol):
    """Carries out steps on a clock of its own."""

    config: ModelConfig
    num_blocks: int

    def execute(self, step: Step) -> list[list[int]]:
        """The tokens drawn for each request of the step: as many as `step.samples` says."""

    def now(self) -> float:
        """Seconds."""

    def wait_until(self, moment: float) -> None:
        """Let time pass until `moment`."""


class ModelRunner:
    """Runs the model over a paged cache. Its clock is the real one."""

    def __init__(self, model: Transformer, config: EngineConfig = EngineConfig()):  # noqa: B008, it is frozen
        if not isinstance(config, EngineConfig):
            raise ValueError(f"config must be an EngineConfig, got {config!r}")
        self.model, self.config = model, model.config
        self.num_blocks = config.num_blocks or default_num_blocks(model, config)
        self.block_size = config.block_size
        self.cache = PagedCache(model.config, self.num_blocks, self.block_size, model.device, model.dtype)

    @torch.inference_mode()
    def execute(self, step: Step) -> list[list[int]]:
        """One flat pass over all new tokens of the step, then all draws in one batch."""
        self.cache.copy(step.copies)
        requests, counts, device = step.requests, step.counts, self.model.device
        starts = [request.num_computed_tokens for request in requests]
        tokens, positions, rows, drawing, end = [], [], [], [], 0
        for request, start, count, samples in zip(requests, starts, counts, step.samples, strict=True):
            tokens += request.token_ids[start : start + count]
            positions += range(start, start + count)
            end += count
            rows += [end - 1] * samples  # the last token's logits, once for each sample
            drawing += [request, *request.samples][:samples]
        inputs = torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
        hidden = self.model(*inputs, self.view(step))
        if not rows:
            return [[] for _ in requests]
        if len(rows) < len(tokens) or rows != list(range(end)):
            hidden = hidden[torch.tensor(rows, device=device)]
        logits = self.model.logits(hidden)
        drawn = iter(sample(logits, [r.params for r in drawing], [r.generator for r in drawing]).tolist())
        return [[next(drawn) for _ in range(samples)] for samples in step.samples]

    def view(self, step: Step) -> PagedView:
        """The cache as the step's pass will see it."""
        starts = [request.num_computed_tokens for request in step.requests]
        return self.cache.view([request.block_table for request in step.requests], starts, step.counts)

    def now(self) -> float:
        """Seconds on the machine's steady clock."""
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        """Sleep."""
        time.sleep(max(0.0, moment - self.now()))


def default_num_blocks(model: Transformer, config: EngineConfig) -> int:
    """Blocks for a full batch of full contexts, or for as much of it as there is memory; one context at least."""
    whole = -(-model.config.max_context // config.block_size)
    limit = CACHE_BYTES
    if model.device.type == "cuda":
        limit = int(GPU_SHARE * torch.cuda.mem_get_info(model.device)[0])
    fits = int(limit // (model.config.kv_bytes_per_token(model.dtype) * config.block_size))
    return max(whole, min(fits, whole * config.max_batch_size))
