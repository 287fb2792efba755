"""The linear layer: where a model keeps nearly all of its bytes, and spends nearly all of its time."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Linear(nn.Module):
    """y = x Wᵀ + b, with `weight` [out_features, in_features] and `bias` [out_features] or None."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        out_features, in_features = self.weight.shape
        return f"{in_features} -> {out_features}{', bias' if self.bias is not None else ''}"
