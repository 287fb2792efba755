"""Checks for the exercises of chapter 4: published caches, replicated heads, chosen groups, where sharing pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from minillm.config import ModelConfig
from minillm.lab.answers import build, work_out
from minillm.lab.checks import CheckFailed, Draw, NotAnswered, choice, describe
from minillm.roofline import Device, decode_step

# Conditions of "Five published models": layers, query heads, key/value heads, head size. A test compares the text.
PUBLISHED = {
    "OPT-13B": (40, 40, 40, 128),
    "Mistral 7B": (32, 32, 8, 128),
    "Yi-34B": (60, 56, 8, 128),
    "Llama 2 70B": (80, 64, 8, 128),
    "Falcon-180B": (80, 232, 8, 64),
}
# Conditions of "Where sharing pays".
MODEL, CONTEXT, GPU = ModelConfig.preset("post-0.5b"), 2048, Device.datasheet("RTX 5090")


def kib_per_token(name: str, shared: bool = True) -> float:
    """KiB of 16-bit keys and values of a token: as published, or with a key/value head for each query head."""
    layers, heads, kv_heads, head_dim = PUBLISHED[name]
    return 2 * layers * (kv_heads if shared else heads) * head_dim * 2 / 1024


def published(kib: Mapping[str, float], multi_head: float, tokens: float) -> None:
    """Exercise "Five published models": KiB per token of each; Falcon's without sharing; OPT's in Falcon's tokens."""
    if kib is None or kib is ...:
        raise NotAnswered("not answered yet: kib")
    if not isinstance(kib, Mapping) or set(kib) != set(PUBLISHED):
        raise CheckFailed(f"kib: expected a dict with the keys {', '.join(PUBLISHED)}, got {describe(kib)}")
    missing = "keys and values are two, and 16 bits are two bytes: one of these factors is missing"
    for name, (layers, heads, kv_heads, _) in PUBLISHED.items():
        right = kib_per_token(name)
        slips = {
            right / 2: missing,
            right / kv_heads: f"that is one key/value head; each layer keeps {kv_heads}",
            right / layers: "that is one layer; every layer keeps its own",
            right * 1.024: "that is kB; a KiB is 1,024 bytes",
            right * 1024: "that is bytes; KiB are asked for",
        }
        if layers == kv_heads:
            slips[right / layers] = f"that is one layer, or one key/value head of each; there are {layers} of either"
        if heads != kv_heads:
            slips[kib_per_token(name, shared=False)] = "that counts the query heads; only key/value heads are kept"
        work_out(f"kib[{name!r}]", kib[name], right, slips, unit="KiB", tolerance=0.001)
    falcon, whole, opt = (
        kib_per_token("Falcon-180B"),
        kib_per_token("Falcon-180B", shared=False),
        kib_per_token("OPT-13B"),
    )
    slips = {
        falcon: "that is the cache as published; with a key/value head for each query head there are more",
        falcon * 8: "that is 8 times the cache as published; how many query heads share one of the 8?",
        whole / 2: missing,
    }
    work_out("multi_head", multi_head, whole, slips, unit="KiB", tolerance=0.001)
    slips = {
        falcon / opt: "that is the other way round: how many of Falcon's fit into one of OPT's?",
        opt / whole: "that is Falcon without sharing; take it as published",
    }
    work_out("tokens", tokens, opt / falcon, slips, unit="tokens")


def replicate(answer: Callable) -> None:
    """Exercise "A head for every chip": fused qkv [(n_heads + 2 n_kv_heads) * head_dim, dim] -> with `wanted` heads."""
    build("replicate", answer, right_replicate, replicate_cases, REPLICATE_MISTAKES)


def right_replicate(qkv: torch.Tensor, n_heads: int, n_kv_heads: int, wanted: int, *, wrong: str = "") -> torch.Tensor:
    """Head by head: new head j is a copy of the head that its query heads read before; `wrong` names a slip."""
    head_dim = len(qkv) // (n_heads + 2 * n_kv_heads)
    q, k, v = qkv.split([n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim])
    copies = wanted // n_kv_heads
    if wrong == "rows":
        return torch.cat((q, k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)))
    if wrong == "blocks":
        return torch.cat((q, *[k, v] * copies))
    parts = [q]
    for name, rows in (("keys", k), ("values", v)):
        heads = rows.split(head_dim)
        tiled = wrong in ("tiled", f"tiled {name}")
        parts += [heads[j % n_kv_heads if tiled else j // copies] for j in range(wanted)]
    whole = torch.cat(parts)
    return torch.cat((whole[: len(q)], whole[len(q) :] / copies)) if wrong == "shared out" else whole


def replicate_cases(draw: Draw) -> Iterator[tuple]:
    """Two heads made four, then other shapes: one head, nothing to copy, every query head its own."""
    for heads, kv_heads, wanted in [(4, 2, 4), (12, 3, 6), (6, 1, 3), (8, 2, 2), (10, 5, 10), (16, 2, 8)]:
        head_dim, dim = draw.choice([2, 4, 6]), draw.choice([3, 5, 7])
        yield draw.tensor((heads + 2 * kv_heads) * head_dim, dim), heads, kv_heads, wanted


def replicate_slip(slip: str) -> Callable:
    """`right_replicate` with one slip."""
    return lambda *case: right_replicate(*case, wrong=slip)


REPLICATE_MISTAKES = {
    "the heads are tiled, 0 1 0 1; the query heads that shared head 0 stand side by side and need 0 0 1 1": (
        replicate_slip("tiled")
    ),
    "the keys are tiled, 0 1 0 1; they need the order 0 0 1 1": replicate_slip("tiled keys"),
    "the values are tiled, 0 1 0 1; they need the order 0 0 1 1": replicate_slip("tiled values"),
    "single rows are repeated; a head is a block of head_dim rows, to be copied as a whole": replicate_slip("rows"),
    "keys and values alternate in blocks; the matrix holds all queries, then all keys, then all values": (
        replicate_slip("blocks")
    ),
    "the copies are scaled down; each query head still reads one head, so a copy must be an exact one": (
        replicate_slip("shared out")
    ),
    "nothing is copied": lambda qkv, *_: qkv,
}


def regroup(answer: Callable) -> None:
    """Exercise "Choose who shares": (qkv [3 n head_dim, dim], out [dim, n head_dim], groups, head_dim) -> both."""
    build("regroup", answer, right_regroup, regroup_cases, REGROUP_MISTAKES)


def right_regroup(
    qkv: torch.Tensor, out: torch.Tensor, groups: Sequence[Sequence[int]], head_dim: int, *, wrong: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head by head: queries and their columns of `out` in the order of the groups, keys and values averaged."""
    order = [head for group in groups for head in group]
    inverse = [order.index(head) for head in range(len(order))]
    q, k, v = (part.split(head_dim) for part in qkv.chunk(3))
    columns = out.split(head_dim, dim=1)
    queries = {"queries stay": range(len(order)), "queries inverse": inverse}.get(wrong, order)
    places = {"out stays": range(len(order)), "out inverse": inverse}.get(wrong, order)
    if wrong == "neighbours":
        groups = torch.arange(len(order)).view(len(groups), -1).tolist()
    rows = [q[head] for head in queries]
    for heads in (k, v):
        for group in groups:
            total = heads[group[0]] if wrong == "first" else sum(heads[head] for head in group)
            rows.append(total if wrong in ("first", "sum") else total / len(group))
    return torch.cat(rows), torch.cat([columns[head] for head in places], dim=1)


def regroup_cases(draw: Draw) -> Iterator[tuple]:
    """Three heads in another order, then groups of two and three, drawn so that no slip of order hides."""
    for heads, size in [(3, 1), (4, 2), (6, 3), (6, 2), (8, 4)]:
        head_dim, dim, order = draw.choice([2, 4]), draw.choice([3, 5]), list(range(heads))
        while telling_nothing(order, size):
            draw.shuffle(order)
        groups = [order[i : i + size] for i in range(0, heads, size)]
        yield draw.tensor(3 * heads * head_dim, dim), draw.tensor(dim, heads * head_dim), groups, head_dim


def telling_nothing(order: Sequence[int], size: int) -> bool:
    """Whether this order equals its inverse, or groups the same neighbours as no order would."""
    inverse = [order.index(head) for head in range(len(order))]
    groups = [set(order[i : i + size]) for i in range(0, len(order), size)]
    return inverse == list(order) or groups == [set(range(i, i + size)) for i in range(0, len(order), size)]


def regroup_slip(slip: str) -> Callable:
    """`right_regroup` with one slip."""
    return lambda *case: right_regroup(*case, wrong=slip)


REGROUP_MISTAKES = {
    "the columns of `out` are where they were; column block i must belong to query head i of the new order": (
        regroup_slip("out stays")
    ),
    "the queries are where they were; a group's query heads must stand side by side": regroup_slip("queries stay"),
    "neighbours are pooled, as `convert` does; here `groups` says who shares": regroup_slip("neighbours"),
    "the columns of `out` are moved the other way: place i takes the columns of head order[i]": (
        regroup_slip("out inverse")
    ),
    "the queries are moved the other way: place i takes head order[i]": regroup_slip("queries inverse"),
    "keys and values are added up; the mean is asked for": regroup_slip("sum"),
    "the first head of each group is kept; the mean is asked for": regroup_slip("first"),
}


def faster(kv_heads: int, batch: int) -> float:
    """How many times faster a step is with so many key/value heads instead of one for each query head."""
    whole, shared = (decode_step(MODEL.with_kv_heads(n), GPU, batch, CONTEXT).time for n in (MODEL.n_heads, kv_heads))
    return whole / shared


def batch_for(times: float, kv_heads: int = MODEL.n_kv_heads) -> int:
    """The smallest batch at which a step becomes at least so many times faster."""
    return next(batch for batch in range(1, 1000) if faster(kv_heads, batch) >= times)


def sharing(balance: float, twice: float, waits_for: str) -> None:
    """Exercise "Where sharing pays": two batches, at which cache and weights balance and a step halves; the wait."""
    weights, one = MODEL.weight_bytes(), CONTEXT * MODEL.kv_bytes_per_token()
    exact = weights / one
    slips = {
        math.floor(exact): "at that batch the weights still outweigh the cache",
        math.ceil(exact * 4 / 20): "that is with 20 key/value heads; the article's model has 4",
        math.ceil(exact * 4): "that is with one key/value head; the article's model has 4",
        math.ceil(exact * 2): "keys and values are two",
    }
    if isinstance(balance, float) and not balance.is_integer():
        raise CheckFailed(f"balance: {balance:,.6g} is not right; a whole number of requests is asked for: round up")
    work_out("balance", balance, math.ceil(exact), slips, unit="requests", tolerance=1e-6)
    right, grouped = batch_for(2), MODEL.n_heads / MODEL.n_kv_heads
    slips = {
        right - 1: f"at that batch it is {faster(MODEL.n_kv_heads, right - 1):.2f} times as fast",
        math.ceil(exact / (grouped - 2)): "one request less will do: with 20 heads the weights are larger as well",
        batch_for(2, 1): "that is with one key/value head; here it is 4",
        math.ceil(exact): "there the cache equals the weights already; it need not be that large",
    }
    work_out("twice", twice, right, slips, unit="requests", tolerance=1e-6)
    reasons = {
        "the cache": "with one head it is a small part of the bytes at that context; compare the columns",
        "the weights": "reading them takes less than half of the step; compare the two clocks in the table",
        "arithmetic": "",
    }
    choice(waits_for, "arithmetic", reasons, name="waits_for")
