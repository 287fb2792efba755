"""How `transformers` serves many requests, behind one call: `serve(requests)` -> seconds, new tokens of each."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from benchmarks.peers import Transformers
from minillm.config import EngineConfig
from minillm.model import Transformer
from minillm.workload import TimedRequest


class PaddedBatches:
    """`transformers` in static batches: prompts padded to the longest of the batch, which runs until its last is done.

    The first of a batch to finish waits for the others. Their surplus tokens are made and thrown away.
    """

    def __init__(self, model: Transformer, batch: int):
        self.model, self.batch = Transformers(model).model, batch

    @torch.inference_mode()
    def serve(self, requests: Sequence[TimedRequest]) -> tuple[float, list[list[int]]]:
        """Seconds for all of them, and the new tokens of each."""
        began, outputs = time.perf_counter(), []
        for start in range(0, len(requests), self.batch):
            outputs += self.serve_batch(requests[start : start + self.batch])
        return time.perf_counter() - began, outputs

    def serve_batch(self, requests: Sequence[TimedRequest]) -> list[list[int]]:
        """New tokens of each; position ids follow from the mask."""
        longest = max(len(request.prompt_ids) for request in requests)
        ids, mask = torch.zeros(2, len(requests), longest, dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, longest - len(request.prompt_ids) :] = 1
        made = self.model.generate(
            ids.to(self.model.device), attention_mask=mask.to(self.model.device), do_sample=False, pad_token_id=0,
            max_new_tokens=max(request.params.max_tokens for request in requests),
        )[:, longest:].tolist()  # fmt: skip
        return [row[: request.params.max_tokens] for row, request in zip(made, requests, strict=True)]


class PeerContinuous:
    """`transformers`' own continuous batching, with as many places, tokens a step and cache as ours.

    Its cache is made and its thread started before the clock is. Raises RuntimeError where it does not run.
    """

    def __init__(self, model: Transformer, config: EngineConfig):
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.model, self.patience = Transformers(model).model, 600
        self.manager = self.model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=config.block_size,
                num_blocks=config.num_blocks,
                max_batch_tokens=config.token_budget,
                max_requests_per_batch=config.max_batch_size,
                allow_block_sharing=False,
                auto_switch_to_flash=model.device.type != "cpu",
            ),
        )
        with torch.inference_mode():  # its thread takes over the mode of its starter
            self.manager.start()

    def serve(self, requests: Sequence[TimedRequest]) -> tuple[float, list[list[int]]]:
        """Seconds for all of them, and the new tokens of each."""
        began, done = time.perf_counter(), {}
        ids = [
            self.manager.add_request(list(r.prompt_ids), max_new_tokens=r.params.max_tokens, eos_token_id=-1)
            for r in requests
        ]
        while len(done) < len(ids):
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                done[result.request_id] = result.generated_tokens
            elif not self.manager.is_running() or time.perf_counter() - began > self.patience:
                raise RuntimeError(f"only {len(done)} of {len(ids)} requests came back")
        return time.perf_counter() - began, [done[id] for id in ids]

    def close(self) -> None:
        """Stop its thread."""
        self.manager.stop(block=True, timeout=5)
