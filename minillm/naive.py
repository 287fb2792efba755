"""Naive generation: to pick each next token, run the whole sequence through the model again.

Correct, short, and the reference that every later path is held to. Making n tokens costs work that
grows with n²; chapter 1 measures it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


class NoCache:
    """Attention that remembers nothing: every sequence comes whole, starting at position 0.

    `lengths` are the tokens of each sequence in the flat run, in order; None means one sequence.
    """

    def __init__(self, lengths: list[int] | None = None):
        self.lengths = lengths

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention inside each sequence; q [T, n_heads, D], k and v [T, n_kv_heads, D] -> like q."""
        lengths = self.lengths or [q.shape[0]]
        if sum(lengths) != q.shape[0]:
            raise ValueError(f"lengths {lengths} add up to {sum(lengths)}, but the run has {q.shape[0]} tokens")
        if len(set(lengths)) == 1:  # a rectangle: one batched product
            q, k, v = (x.unflatten(0, (len(lengths), lengths[0])).transpose(1, 2) for x in (q, k, v))
            return causal_attention(q, k, v).transpose(1, 2).flatten(0, 1)
        runs = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([causal_attention(*(x.transpose(0, 1)[None] for x in run))[0].transpose(0, 1) for run in runs])


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [B, n_heads, T, D], k and v [B, n_kv_heads, T, D] -> [B, n_heads, T, D]; token t sees tokens 0 to t."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
