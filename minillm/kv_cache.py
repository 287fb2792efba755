"""The KV cache: keep the keys and values of every token, and each new token costs one token's work.

`ContiguousCache` reserves one block of memory for each sequence, sized for the longest it may become.
Chapter 3 builds it, chapter 5 shows what the reservation wastes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from minillm.config import ModelConfig
from minillm.model import Transformer
from minillm.naive import causal_attention, check_prompt
from minillm.sampling import SamplingParams, StopCondition, sample


class ContiguousCache:
    """Keys and values of `num_sequences` sequences, each up to `capacity` tokens.

    `k` and `v` are [n_layers, num_sequences, n_kv_heads, capacity, head_dim]; `lengths[s]` says how many
    tokens of sequence s are in them. A forward pass is handed `cache.view(counts)`; with one sequence
    the cache itself will do.
    """

    def __init__(
        self, config: ModelConfig, num_sequences: int = 1, capacity: int | None = None, device=None, dtype=None
    ):
        capacity = config.max_context if capacity is None else capacity
        for name, value in (("num_sequences", num_sequences), ("capacity", capacity)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if capacity > config.max_context:
            raise ValueError(f"capacity {capacity} is more than the model's context of {config.max_context}")
        shape = (config.n_layers, num_sequences, config.n_kv_heads, capacity, config.head_dim)
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.capacity = capacity
        self.lengths = [0] * num_sequences
        self._view: ContiguousView | None = None  # of the pass that `attend` is in

    def view(self, counts: Sequence[int]) -> ContiguousView:
        """The cache as one forward pass sees it: the flat run holds counts[s] new tokens of sequence s, in order.

        Raises ValueError for counts that do not match the cache or do not fit its capacity.
        """
        if len(counts) != len(self.lengths):
            raise ValueError(f"{len(counts)} counts for a cache of {len(self.lengths)} sequences")
        for s, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if not isinstance(count, int) or count < 0 or length + count > self.capacity:
                raise ValueError(
                    f"sequence {s} holds {length} tokens and cannot take {count} more: its capacity is {self.capacity}"
                )
        return ContiguousView(self, list(counts))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """For a cache of one sequence: the whole run continues it. See `ContiguousView.attend`."""
        if len(self.lengths) != 1:
            raise ValueError(f"this cache holds {len(self.lengths)} sequences: pass cache.view(counts) to the model")
        if layer == 0 or self._view is None:
            self._view = self.view([q.shape[0]])
        view = self._view
        if layer == len(self.k) - 1:
            self._view = None
        return view.attend(layer, q, k, v)

    def positions(self, counts: Sequence[int]) -> torch.Tensor:
        """Positions [T] of the new tokens of a step: those of sequence s start at lengths[s]."""
        runs = (range(n, n + c) for n, c in zip(self.lengths, counts, strict=True))
        return torch.tensor([position for run in runs for position in run], dtype=torch.long, device=self.k.device)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens of one sequence from `length` on. Raises ValueError if it holds fewer."""
        if not 0 <= sequence < len(self.lengths):
            raise ValueError(f"there is no sequence {sequence}: this cache holds {len(self.lengths)}")
        if not isinstance(length, int) or not 0 <= length <= self.lengths[sequence]:
            raise ValueError(f"cannot truncate sequence {sequence} of {self.lengths[sequence]} tokens to {length}")
        self.lengths[sequence] = length

    @property
    def num_bytes(self) -> int:
        """Bytes reserved, used or not."""
        return self.k.nbytes + self.v.nbytes


class ContiguousView:
    """One step over a `ContiguousCache`.

    Lengths grow when the last layer has stored its part. A pass that fails before that leaves the cache as it
    was. One that fails later (in the sampler, say) leaves its tokens counted: `truncate` to the old length first.
    """

    def __init__(self, cache: ContiguousCache, counts: list[int]):
        self.cache = cache
        self.counts = counts
        self.starts = list(cache.lengths)
        self.total = sum(counts)
        self.together = set(counts) == {1} and len(set(self.starts)) == 1
        if self.together:  # slices for all layers at once: one call each, where a layer at a time would make two
            start = self.starts[0]
            self.slots = list(zip(cache.k[:, :, :, start], cache.v[:, :, :, start], strict=True))
            self.stored = list(zip(cache.k[:, :, :, : start + 1], cache.v[:, :, :, : start + 1], strict=True))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v [T, n_kv_heads, D] at the end of their sequences, then attend over all that is stored.

        q [T, n_heads, D] -> [T, n_heads, D]. Raises ValueError if the run is not as long as the counts say.
        """
        if self.total != q.shape[0]:
            raise ValueError(f"counts {self.counts} add up to {self.total}, but the run has {q.shape[0]} tokens")
        if k.shape != v.shape or k.shape != (q.shape[0], *self.cache.k.shape[2::2]):
            expected = [q.shape[0], *self.cache.k.shape[2::2]]
            raise ValueError(f"k and v must be {expected}, got {list(k.shape)} and {list(v.shape)}")
        if self.starts != self.cache.lengths:
            raise ValueError(
                f"this view began at lengths {self.starts}, the cache is at {self.cache.lengths}: make a new one"
            )
        if self.together:
            out = self.decode_together(layer, q, k, v)
        else:
            out = self.one_by_one(self.cache.k[layer], self.cache.v[layer], q, k, v)
        if layer == len(self.cache.k) - 1:
            self.cache.lengths = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        return out

    def decode_together(self, layer, q, k, v) -> torch.Tensor:
        """Every sequence has one new token and the same length: one product over the whole batch.

        The query heads that share a key/value head become the rows of one query, so it is read once for all.
        """
        slot_k, slot_v = self.slots[layer]
        slot_k.copy_(k)
        slot_v.copy_(v)
        grouped = q.view(len(q), k.shape[1], -1, q.shape[-1])  # [B, n_kv_heads, group, D]
        return F.scaled_dot_product_attention(grouped, *self.stored[layer]).flatten(1, 2)

    def one_by_one(self, keys, values, q, k, v) -> torch.Tensor:
        """Any mix of counts and lengths: attention sequence by sequence."""
        out, offset = torch.empty_like(q), 0
        for s, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            if count == 0:
                continue
            run, end = slice(offset, offset + count), start + count
            keys[s, :, start:end], values[s, :, start:end] = k[run].transpose(0, 1), v[run].transpose(0, 1)
            new_q, seen_k, seen_v = q[run].transpose(0, 1)[None], keys[None, s, :, :end], values[None, s, :, :end]
            out[run] = chunk_attention(new_q, seen_k, seen_v)[0].transpose(0, 1)
            offset += count
        return out


def chunk_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last T tokens of a sequence attend to all S of it: q [B, n_heads, T, D], k and v [B, n_kv_heads, S, D].

    New token t sees the S - T tokens before the chunk and the new ones up to itself. A whole prompt
    (S = T) is plain causal attention.
    """
    count, end = q.shape[2], k.shape[2]
    if count == end:
        return causal_attention(q, k, v)
    if count == 1:  # it sees everything, so the query heads that share a key/value head can be rows of one query
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[3])
        return F.scaled_dot_product_attention(grouped, k, v).reshape(q.shape)
    mask = torch.ones(count, end, dtype=torch.bool, device=q.device).tril(end - count)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@torch.inference_mode()
def stream(model: Transformer, prompt_ids: Sequence[int], params: SamplingParams, tokenizer=None) -> Iterator[int]:
    """Yield new tokens as they are made: the prompt goes through the model once, then one token at a time.

    The same tokens as `naive.stream` (up to near-ties, since sums are rounded in another order), with the same
    arguments and errors.
    """
    check_prompt(prompt_ids, params, model.config)
    stop = StopCondition(params, model.config.eos_token_ids, tokenizer)
    generator = params.make_generator()
    capacity = len(prompt_ids) + params.max_tokens - 1  # the last token is never fed back
    cache = ContiguousCache(model.config, 1, capacity, model.device, model.dtype)
    new, reason = list(prompt_ids), None
    while reason is None:
        # Positions go on where the cache ends: the first decoded token stands at position len(prompt_ids).
        hidden = model(torch.tensor(new, device=model.device), cache.positions([len(new)]), cache)
        token = sample(model.logits(hidden[-1:]), [params], [generator]).item()
        new, reason = [token], stop.add(token)
        yield token


def generate(model: Transformer, prompt_ids: Sequence[int], params: SamplingParams, tokenizer=None) -> list[int]:
    """New tokens only, with a cache; see `stream`."""
    return list(stream(model, prompt_ids, params, tokenizer))
