"""The linear layer: where a model keeps nearly all of its bytes, and spends nearly all of its time.

The product is always x Wᵀ + b. How long it takes depends on the order in which the weights lie in memory: a
library that wants another order rearranges them at every call, and for the few rows of a decode step that costs
more than the product itself. So on a CPU we rearrange them once. A single row needs no other order, and on a GPU
the library's own product is the one to use.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

PACKED_FROM = 400_000  # weights: in a smaller layer, a packed product's fixed cost is more than it saves
PACKED_FOR = 32  # rows that the packed order is chosen for; it serves any number


class Linear(nn.Module):
    """y = x Wᵀ + b, with `weight` [out_features, in_features] and `bias` [out_features] or None.

    Frozen weights in float32 on a CPU are rearranged by the first product. The parameter keeps its shape and values,
    but with more outputs than inputs it is stored column by column, which is the faster order for one row. For two
    or more rows a large layer has a packed copy, as large again; in a small one it would not pay. It is made anew
    when the weights change, except behind autograd's back (`weight.data`).
    Weights in training, and everything else, go through `F.linear` as they are. Where memory is short,
    `Linear.packing = False` does without the copies.
    """

    packing = True

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self._packed: tuple | None = None  # what the copy was made of, and the copy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        weight, packed = self.weight, None
        if weight.requires_grad:
            self._packed = None  # training is about to change it; a fused optimizer does so without a new version
        elif weight.device.type == "cpu" and weight.dtype == torch.float32 and not torch.compiler.is_compiling():
            if weight.stride(0) != 1 and weight.shape[0] > weight.shape[1]:
                store_by_column(weight)  # memory is read in runs of the longer side
            if weight.numel() >= PACKED_FROM and x.numel() > x.shape[-1]:
                packed = self._packed_weight(x)
        return F.linear(x, weight, self.bias) if packed is None else packed_linear(x, packed, self.bias)

    def _packed_weight(self, x: torch.Tensor) -> torch.Tensor | None:
        weight = self.weight
        if not self.packing or weight.is_inference():  # such a tensor has no version
            return None
        if x.dtype != weight.dtype or (x.requires_grad and torch.is_grad_enabled()):
            return None  # a packed product has no gradient
        source = (weight.data_ptr(), weight._version)
        if self._packed is None or self._packed[0] != source:
            self._packed = source, pack(weight)
        return self._packed[1]

    def _apply(self, fn, recurse=True):
        self._packed = None  # .to() may put other values at the old address
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_packed": None}  # a packed weight can be neither copied nor pickled

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        out_features, in_features = self.weight.shape
        return f"{in_features} -> {out_features}{', bias' if self.bias is not None else ''}"


def store_by_column(weight: torch.Tensor) -> None:
    """Turn the memory of `weight` [out_features, in_features]: shape and values stay, stride(0) becomes 1.

    F.linear then runs as x @ Wt with Wt stored [in_features, out_features].
    """
    with torch.inference_mode(weight.is_inference()):  # the memory must be of the parameter's own kind
        weight.data = weight.detach().t().contiguous().t()


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """A copy of `weight` [out_features, in_features] in the order that oneDNN multiplies fastest.

    None where there is no such order: another device or dtype than float32 on a CPU, or a PyTorch without
    oneDNN. It is opaque: all one can do is to multiply with it, by `packed_linear`.
    """
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.numel():
        return None
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return None
    return ops._reorder_linear_weight(weight.detach(), PACKED_FOR)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in_features] times a weight from `pack` -> [..., out_features]; float32, and without gradients."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
