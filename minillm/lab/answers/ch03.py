"""Checks for the exercises of chapter 3: room on a card, ragged decoding, the next turn, concatenating."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from minillm.lab.answers import build, work_out
from minillm.lab.checks import CheckFailed, Draw, choice, difference, place

# Conditions of "Room on a card". The exercise states them in words, and a test compares.
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
MEMORY_GB, WEIGHT_GB, TOKENS = 24, 16.06, 4096
# What stands in unwritten slots, as factors of random keys and values. Old keys are of the usual size: much larger
# ones may get a weight of zero by chance, and hide that they are read.
NEVER_WRITTEN, OLD = (math.nan, math.nan), (1.0, 1e3)


def room(grouped: float, full: float, sequences: float, sequences_full: float) -> None:
    """Exercise "Room on a card": KiB per token for two models, and whole sequences that fit beside the weights."""
    per_token = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    ratio = HEADS // KV_HEADS
    work_out(
        "grouped",
        grouped,
        per_token / 1024,
        {
            per_token / 2 / 1024: "keys and values are two, and 16 bits are two bytes: one of these factors is missing",
            per_token / LAYERS / 1024: "that is one layer; every layer keeps its own",
            per_token / KV_HEADS / 1024: f"that is one key/value head; each layer keeps {KV_HEADS}",
            ratio * per_token / 1024: "that counts the query heads; only key/value heads are kept",
            per_token: "that is bytes; KiB are asked for",
            per_token / 1000: "that is kB; a KiB is 1,024 bytes",
        },
        unit="KiB",
        tolerance=0.001,
    )
    work_out(
        "full",
        full,
        ratio * per_token / 1024,
        {
            per_token / 1024: "with a key/value head for each query head, there are more heads to keep",
            per_token / KV_HEADS / 1024: f"that is one key/value head; each layer of this model keeps {HEADS}",
        },
        unit="KiB",
        tolerance=0.001,
    )
    left = (MEMORY_GB - WEIGHT_GB) * 1e9
    for name, answer, size in (
        ("sequences", sequences, per_token),
        ("sequences_full", sequences_full, ratio * per_token),
    ):
        fit = left / (TOKENS * size)
        if isinstance(answer, float) and not answer.is_integer():
            raise CheckFailed(f"{name}: {answer:,.6g} is not right; only whole sequences count: round down")
        work_out(
            name,
            answer,
            int(fit),
            {
                int(fit) + 1: "that many do not fit: a GB is 10⁹ bytes here; or you did not round down",
                int(MEMORY_GB * 1e9 / (TOKENS * size)): "the weights need their place first",
                int(left / size): f"that many tokens fit; a sequence has {TOKENS:,} of them",
            },
            unit="sequences",
            tolerance=1e-6,
        )


def ragged_decode(answer: Callable) -> None:
    """Exercise "One token for everyone": store one new token of each sequence, then attend.

    q [S, n_heads, D], k and v [S, n_kv_heads, D], keys and values [S, n_kv_heads, capacity, D] (changed in
    place), lengths: tokens of each sequence that are stored already -> [S, n_heads, D].
    """
    build(
        "ragged_decode", with_storage(answer), with_storage(right_decode), decode_cases, DECODE_MISTAKES, same_storage
    )


def with_storage(decode: Callable) -> Callable:
    """The function, returning what is in the cache after the call as well."""
    if not callable(decode):
        return decode

    @functools.wraps(decode)
    def call(q, k, v, keys, values, lengths):
        output = decode(q, k, v, keys, values, lengths)
        return output if output is None or output is ... else {"keys": keys, "values": values, "output": output}

    return call


def same_storage(expected: dict, given: dict, q, k, v, keys, values, lengths: Sequence[int]) -> str | None:
    """What is wrong with the cache after the call, slots that should have stayed as they were first, or the output."""
    for name, before in (("keys", keys), ("values", values)):
        where = f"`{name}` after the call"
        if wrong := difference(expected[name], given[name], where=where):
            if given[name].shape == before.shape:
                changed = ~torch.isclose(given[name], before, equal_nan=True)
                changed[range(len(lengths)), :, lengths] = False  # these are for the new tokens
                if changed.any():
                    s, _, slot, _ = place(changed, 0)
                    return f"{where}: slot {slot} of sequence {s} was changed, and only slot {lengths[s]} may be"
            return wrong
    return difference(expected["output"], given["output"], where="the output")


def right_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: Sequence[int],
    *, wrong: str = "",
) -> torch.Tensor:  # fmt: skip
    """Head by head and sequence by sequence, from the definition; `wrong` names a slip to make."""
    group = q.shape[1] // k.shape[1]
    output = torch.empty_like(q)
    for s, length in enumerate(lengths):
        slot = {"late": min(length + 1, keys.shape[2] - 1), "early": max(length - 1, 0)}.get(wrong, length)
        for cache, new, other in ((keys, k, "values alone"), (values, v, "keys alone")):
            if wrong not in ("not stored", other):
                cache[s, :, slot] = new[s]
        end = {
            "old only": length,
            "whole": keys.shape[2],
            "longest": max(lengths) + 1,
            "not NaN": int((~keys[s, 0, :, 0].isnan()).sum()),
        }.get(wrong, length + 1)
        for head in range(q.shape[1]):
            shared = head % k.shape[1] if wrong == "tiled" else head // group
            scores = keys[s, shared, :end] @ q[s, head]
            weights = (scores / (1 if wrong == "unscaled" else q.shape[-1] ** 0.5)).softmax(0)
            output[s, head] = weights @ values[s, shared, :end]
    return output


def decode_cases(draw: Draw) -> Iterator[tuple]:
    """One sequence, then several of unlike lengths, empty and full ones; unwritten slots hold NaN or old numbers."""
    shapes = [([2], 2, 2, 3), ([0], 1, 3, 2), ([3, 1], 1, 1, 1), ([0, 5, 2], 2, 3, 2), ([4, 4, 1, 7], 3, 2, 1)]
    for (lengths, kv_heads, group, spare), unwritten in itertools.product(shapes, (NEVER_WRITTEN, OLD)):
        size, capacity = draw.choice([3, 5, 8]), max(lengths) + spare
        q = draw.tensor(len(lengths), kv_heads * group, size, dtype=torch.float64)
        k, v = (draw.tensor(len(lengths), kv_heads, size, dtype=torch.float64) for _ in range(2))
        stored = [draw.tensor(len(lengths), kv_heads, capacity, size, dtype=torch.float64) for _ in range(2)]
        for (tensor, factor), (s, length) in itertools.product(zip(stored, unwritten, strict=True), enumerate(lengths)):
            tensor[s, :, length:] *= factor
        yield q, k, v, *stored, lengths


def decode_slip(slip: str) -> Callable:
    """`right_decode` with one slip."""
    return with_storage(lambda *case: right_decode(*case, wrong=slip))


def rebound(q, k, v, keys, values, lengths) -> torch.Tensor:
    """The right output, from a copy of the cache."""
    return right_decode(q, k, v, keys.clone(), values.clone(), lengths)


DECODE_MISTAKES = {
    "this is what tiling the heads gives; neighbours share a key/value head: head h reads h // group": decode_slip(
        "tiled"
    ),
    "the scores are not scaled: divide them by the square root of the head size": decode_slip("unscaled"),
    "the new token is stored one slot too far: with n stored tokens, slots 0 to n - 1 are taken": decode_slip("late"),
    "the new token overwrites the last stored one: with n stored tokens, slot n is the next": decode_slip("early"),
    "the new token sees itself too: attend over lengths[s] + 1 tokens": decode_slip("old only"),
    "what was never written need not be NaN, old numbers may stand there: go by `lengths`": decode_slip("not NaN"),
    "a sequence reads as far as the longest, where nothing was written for it; masking the scores alone does not keep "
    "that out, as a weight of zero times NaN is NaN": decode_slip("longest"),
    "slots beyond a sequence's own length are read; what stands there was never written": decode_slip("whole"),
    "the output is right, but the new keys and values are not in `keys` and `values` after the call": with_storage(
        rebound
    ),
    "the new keys and values were not stored before attending": decode_slip("not stored"),
    "the new keys were stored, the new values were not": decode_slip("keys alone"),
    "the new values were stored, the new keys were not": decode_slip("values alone"),
}


def next_turn(answer: Callable) -> None:
    """Exercise "The next turn": (cached ids, prompt ids) -> (tokens to keep, ids to feed, their positions)."""
    build("next_turn", answer, right_next_turn, turn_cases, TURN_MISTAKES)


def right_next_turn(cached: Sequence[int], prompt: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """Keep the common start, but feed at least the last token of the prompt: its row gives the logits."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(cached, prompt, strict=False))
    return turn(min(sum(1 for _ in alike), len(prompt) - 1), prompt)


def turn(keep: int, prompt: Sequence[int], first_position: int | None = None) -> tuple[int, list[int], list[int]]:
    """The answer that keeps `keep` tokens; positions go on where those end."""
    start = keep if first_position is None else first_position
    return keep, list(prompt[keep:]), list(range(start, start + len(prompt) - keep))


def turn_cases(draw: Draw) -> Iterator[tuple]:
    """The chat goes on; nothing kept; another ending, then the same tokens again; the same prompt; a shorter one."""
    yield [], draw.tokens(3, 50)
    first, added = draw.tokens(5, 50), draw.tokens(4, 50)
    yield first, first + added
    changed = list(first)
    changed[2] = 50 + draw.randrange(50)
    yield first, changed + added
    yield [7, *added], [8, *added]
    yield first, first
    yield first + added, first
    start = draw.tokens(draw.randrange(10, 20), 20)
    yield start + draw.tokens(3, 20), start + [20 + x for x in draw.tokens(5, 20)]


def uncapped(cached: Sequence[int], prompt: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """Keeps the whole prompt where all of it is cached, and feeds nothing."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(cached, prompt, strict=False))
    return turn(sum(1 for _ in alike), prompt)


def agreeing(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """Places where the two agree, anywhere."""
    return sum(a == b for a, b in zip(cached, prompt, strict=False))


TURN_MISTAKES = {
    "nothing is left to feed, so there is no row to take logits from: feed at least the last token": uncapped,
    "positions go on where the kept tokens end; these start at 0": lambda cached, prompt: turn(
        right_next_turn(cached, prompt)[0], prompt, first_position=0
    ),
    "positions go on where the kept tokens end, not where the cache ended": lambda cached, prompt: turn(
        right_next_turn(cached, prompt)[0], prompt, first_position=len(cached)
    ),
    "positions are off by one: the first token fed stands at position `keep`": lambda cached, prompt: turn(
        right_next_turn(cached, prompt)[0], prompt, first_position=right_next_turn(cached, prompt)[0] + 1
    ),
    "nothing is kept; the common start of both need not be computed again": lambda cached, prompt: turn(0, prompt),
    "one token too few is kept: the last common one is recomputed": lambda cached, prompt: turn(
        max(0, uncapped(cached, prompt)[0] - 1), prompt
    ),
    "the lengths are compared, not the tokens": lambda cached, prompt: turn(min(len(cached), len(prompt) - 1), prompt),
    "tokens that agree after the first difference do not count: their keys and values hold another past": (
        lambda cached, prompt: turn(min(agreeing(cached, prompt), len(prompt) - 1), prompt)
    ),
}


def concatenating(cache_alone: float, with_weights: float, conclusion: str) -> None:
    """Exercise "The cost of growing": traffic of a concatenating cache over that of a preallocated one."""
    if isinstance(cache_alone, float) and not cache_alone.is_integer():
        raise CheckFailed(
            f"cache_alone: {cache_alone:g} is not right; towards which whole number do the rows of the first table go?"
        )
    work_out(
        "cache_alone",
        cache_alone,
        3,
        {
            2: "the copy reads the old rows and writes them again; attention then reads them once more",
            1: "look at the last rows of the first table",
        },
        tolerance=1e-6,
    )
    work_out(
        "with_weights",
        with_weights,
        2,
        {
            3: "that leaves out the weights, which both versions read: (W + 3K) / (W + K) with K = W",
            1.5: "that counts 2K for the concatenating cache; it reads, writes and reads again, 3K",
            4: "that is the concatenating version's traffic; divide by that of the other, W + K",
        },
        tolerance=0.02,
    )
    reasons = {
        "the context is short": "then the weights are nearly all that is read, and copying a little more hardly shows",
        "the context is long": "",
        "the model is large": "more weights to read make the copied keys and values a smaller part",
    }
    choice(conclusion, "the context is long", reasons, name="conclusion")
