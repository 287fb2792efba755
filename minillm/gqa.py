"""Grouped-query attention: give a trained multi-head model fewer key/value heads.

A key/value head that serves a group of query heads shrinks the cache, and what a step reads of it, by the size of
the group. `convert` makes such a model out of one that has more heads, by averaging them, and `uptrain` lets it
get used to that: the recipe of Ainslie et al. (2023), "GQA", section 2. The model file needs no change, since its
attention is grouped already.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from minillm.checkpoints import train
from minillm.model import Transformer


@torch.no_grad()
def convert(model: Transformer, n_kv_heads: int) -> Transformer:
    """A copy of `model` with `n_kv_heads` key/value heads, each the mean of neighbours (Ainslie et al., 2023).

    The model may be multi-head or grouped; `n_kv_heads` must divide its number of key/value heads (the same
    number gives a plain copy), else ValueError. Query heads and all other weights stay as they are. The copy has
    weights of its own, in the same dtype and place, in eval mode and without gradients, as `load_model` gives them.
    """
    config = model.config
    if not isinstance(n_kv_heads, int) or isinstance(n_kv_heads, bool) or n_kv_heads < 1:
        raise ValueError(f"n_kv_heads must be a positive integer, got {n_kv_heads!r}")
    if config.n_kv_heads % n_kv_heads:
        possible = ", ".join(str(n) for n in range(1, config.n_kv_heads + 1) if not config.n_kv_heads % n)
        raise ValueError(
            f"{config.n_kv_heads} key/value heads cannot form {n_kv_heads} equal groups; use one of {possible}"
        )
    weights = model.state_dict()
    for name, stored in weights.items():
        if ".qkv." in name:  # the matrix, and the bias where there is one
            rows = [config.q_dim, config.kv_dim, config.kv_dim]
            q, k, v = stored.split(rows)
            weights[name] = torch.cat((q, *(pool(x, n_kv_heads, config.head_dim) for x in (k, v))))
    with torch.device(model.device):
        converted = Transformer(config.with_kv_heads(n_kv_heads)).to(model.dtype)
    converted.load_state_dict(weights)
    return converted.eval().requires_grad_(False)


def pool(rows: torch.Tensor, n_kv_heads: int, head_dim: int) -> torch.Tensor:
    """Mean of each run of neighbouring heads: rows [old heads * head_dim, ...] -> [n_kv_heads * head_dim, ...].

    Neighbours, because query head h reads key/value head h // group: those that will share a head stand side by side.
    """
    heads = rows.unflatten(0, (n_kv_heads, -1, head_dim))  # [new heads, old heads in each, head_dim, ...]
    return heads.mean(1).flatten(0, 1)


def uptrain(
    model: Transformer,
    ids: torch.Tensor,
    steps: int,
    learning_rate: float = 5e-4,
    batch: int = 4,
    context: int | None = None,
    dropout: float = 0.15,
    seed: int = 1,
    watch: Callable[[int, Transformer, float], None] | None = None,
) -> Transformer:
    """A copy of `model`, trained on for `steps` steps of `batch` windows of `context` tokens out of `ids` [N].

    Ainslie et al. (2023) spend 5% of the original steps, with the original recipe. Here that is `tiny`'s recipe, but
    for the learning rate: it rises over the first tenth of the steps to a part of `tiny`'s peak of 2e-3, and falls to
    zero along a cosine. `context` defaults to the model's. `watch(step, model, loss)` is called after each step,
    counted from 1, with that step's training loss in nats per token. Raises ValueError naming a number out of range,
    a text shorter than a window, or weights in 16 bits, which would round such small changes away.
    """
    context = model.config.max_context if context is None else context
    check_uptraining(model, ids, context, steps, batch, learning_rate, dropout)
    recipe = train.Recipe(steps, batch, learning_rate, warmup=steps // 10, dropout=dropout, seed=seed)
    learner = convert(model, model.config.n_kv_heads).requires_grad_(True)
    optimizer = train.make_optimizer(learner, recipe)
    train.add_dropout(learner, dropout)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for step in range(steps):
            loss = train.update(learner, optimizer, recipe, step, ids, context, train.loss_of)
            if watch is not None:
                watch(step + 1, learner, loss.item())
    return convert(learner, model.config.n_kv_heads)  # a copy without the hooks that drop values


def check_uptraining(
    model: Transformer, ids: torch.Tensor, context: int, steps: int, batch: int, learning_rate: float, dropout: float
) -> None:
    """Refuse, before any work, what `uptrain` cannot do. Raises ValueError naming the value and what would do."""
    for name, value in (("steps", steps), ("batch", batch), ("context", context)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if context > model.config.max_context:
        raise ValueError(f"context {context} is more than the model's context of {model.config.max_context}")
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate must be a positive number, got {learning_rate!r}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}")
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"ids must be a tensor of token ids [N], got {type(ids).__name__}")
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32) or len(ids) < context + 2:
        raise ValueError(
            f"ids must be one run of at least {context + 2} token ids (a window of {context}, the token that follows "
            f"it, and one to spare), got a {str(ids.dtype).removeprefix('torch.')} tensor of shape {list(ids.shape)}"
        )
    least, most = ids.min().item(), ids.max().item()
    if least < 0 or most >= model.config.vocab_size:
        raise ValueError(f"ids run from {least} to {most}; the vocabulary is 0 to {model.config.vocab_size - 1}")
    if model.dtype not in (torch.float32, torch.float64):
        name = str(model.dtype).removeprefix("torch.")
        raise ValueError(f"weights in {name} cannot be trained: small changes are rounded away; load them in float32")
