"""Checks for the exercises of chapter 9: send or compute again, unlike layers, how many of each, the wrong half."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from minillm.lab.answers import build, work_out
from minillm.lab.checks import Draw, choice

# Conditions of "Send, or compute again?". The exercise states them in words, and a test compares.
LAYERS, KV_HEADS, HEAD_DIM, TOKENS, RATE, LINK = 32, 8, 128, 4000, 20_000, 100  # tokens a second, Gb/s


def send(size: float, transfer: float, recompute: float, break_even: float) -> None:
    """Exercise "Send, or compute again?": MB of a prompt, ms to send it, ms to compute it, Gb/s where both agree."""
    token = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    whole, link = TOKENS * token, LINK / 8 * 1e9
    prompt_size(size, token, whole)
    work_out(
        "transfer",
        transfer,
        1000 * whole / link,
        {
            1000 * whole / (LINK * 1e9): "the link's rate is in bits: a byte has eight",
            whole / link: "that is seconds; ms are asked for",
            1000 * whole / link / LAYERS: "that is the last layer; the whole prompt is asked for",
        },
        unit="ms",
    )
    work_out(
        "recompute",
        recompute,
        1000 * TOKENS / RATE,
        {
            TOKENS / RATE: "that is seconds; ms are asked for",
            1000 * RATE / TOKENS: "tokens over tokens a second, not the other way round",
        },
        unit="ms",
    )
    even = token * RATE * 8 / 1e9
    work_out(
        "break_even",
        break_even,
        even,
        {
            even / 8: "that is GB/s; a byte has eight bits",
            even * 8: "once too often by eight: bytes of a token, tokens a second, bits of a byte",
            LINK: "that is the link we have; it is faster than it must be",
            LINK * (1000 * TOKENS / RATE) / (1000 * whole / link): "the other way round: this link is faster, so the "
            "one asked for is slower",
        },
        unit="Gb/s",
    )


def prompt_size(size: float, token: int, whole: int) -> None:
    """The part of `send` that asks for the size, where a token takes `token` bytes and the prompt `whole` bytes."""
    work_out(
        "size",
        size,
        whole / 1e6,
        {
            whole / 2e6: "keys and values are two, and 16 bits are two bytes: one of these factors is missing",
            whole / LAYERS / 1e6: "that is one layer; every layer has its own",
            whole / KV_HEADS / 1e6: "that is one key/value head; there are eight",
            token / 1e6: "that is one token",
            whole / 2**20: "that is MiB; an MB is 10⁶ bytes",
            whole * 8 / 1e6: "that is Mb; bytes are asked for",
        },
        unit="MB",
        tolerance=0.003,
    )


def left_to_wait(answer: Callable) -> None:
    """Exercise "Layers that are not alike": seconds of each layer, to compute and to send -> seconds left at last."""
    build("left_to_wait", answer, right_wait, wait_cases, WAIT_MISTAKES)


def right_wait(compute: Sequence[float], transfer: Sequence[float]) -> float:
    """The last to leave decides: layers from i on leave in a row, at the earliest when layer i is computed."""
    ends = list(itertools.accumulate(compute))
    return max(end + sum(transfer[layer:]) for layer, end in enumerate(ends)) - ends[-1]


def wait_cases(draw: Draw) -> Iterator[tuple]:
    """One layer, a fast and a slow link, one slow layer at either end; then at random. Multiples of 1/64, so exact."""
    yield [2.0], [0.5]
    yield [1.0, 1.0, 1.0], [0.25, 0.25, 0.25]
    yield [1.0, 1.0, 1.0], [3.0, 3.0, 3.0]
    yield [1.0, 1.0, 1.0], [4.0, 0.25, 0.5]
    yield [3.0, 1.0, 2.0], [0.25, 0.25, 5.0]
    yield [1.0, 6.0, 0.5], [2.0, 1.0, 1.5]
    for _ in range(25):
        layers = draw.randrange(1, 9)
        yield tuple([draw.randrange(1, 256) / 64 for _ in range(layers)] for _ in range(2))


def formula(compute: Sequence[float], transfer: Sequence[float]) -> float:
    """The chapter's formula, which takes all layers to be alike."""
    c, s, layers = sum(compute), sum(transfer), len(compute)
    return max(s / layers, s - c * (layers - 1) / layers)


WAIT_MISTAKES = {
    "that is when everything has left; the time after the last layer's computation is asked for": lambda c, t: (
        right_wait(c, t) + sum(c)
    ),
    "that sends only when all is computed: a layer can leave while the next ones are computed": lambda c, t: sum(t),
    "the wait cannot be negative: a layer cannot leave before it is computed": lambda c, t: sum(t) - sum(c),
    "a layer cannot leave before it is computed": lambda c, t: max(0.0, sum(t) - sum(c)),
    "the link can stand idle between layers: go through them one by one": lambda c, t: max(t[-1], sum(t) - sum(c[1:])),
    "the last layer leaves after its computation, but others may still be in front of it": lambda c, t: t[-1],
    "the formula is for equal layers: go through them one by one": formula,
}


def best_split(answer: Callable) -> None:
    """Exercise "How many of each": (prefill GPUs, decode GPUs) that serve the most requests a second.

    gpus: in all; prefill: seconds of a prompt; tokens of an answer; base, each: seconds of a step and of each request
    in it; limit: of the batch; tpot: the target in seconds.
    """
    build("best_split", answer, right_split, split_cases, SPLIT_MISTAKES)


def right_split(gpus, prefill, tokens, base, each, limit, tpot, *, wrong: str = "") -> tuple[int, int]:
    """Try all; `wrong` names a slip to make."""
    batch = 1
    within = {"no target": lambda b: True, "strictly": lambda b: base + each * b < tpot}.get(
        wrong, lambda b: base + each * b <= tpot
    )
    while (batch < limit or wrong == "no limit") and within(batch + 1) and batch < 100_000:
        batch += 1
    if wrong == "over target":
        batch = min(limit, math.ceil((tpot - base) / each))
    step = {"base only": base, "target": tpot}.get(wrong, base + each * batch)
    steps = tokens if wrong == "first token" else tokens - 1
    decode = {"one at a time": 1, "each step": batch * steps}.get(wrong, batch)
    decode /= steps * step + (prefill if wrong == "prefill too" else 0)
    rates = (decode, 1 / prefill) if wrong == "swapped" else (1 / prefill, decode)

    def served(p: int) -> float:
        both = p * rates[0], (gpus - p) * rates[1]
        return sum(both) if wrong == "sum" else min(both)

    order = range(gpus - 1, 0, -1) if wrong == "ties" else range(1, gpus)
    best = max(order, key=served)
    if to_whole := {"rounded": round, "floored": math.floor, "ceiled": math.ceil}.get(wrong):
        best = min(gpus - 1, max(1, to_whole(gpus * rates[1] / sum(rates))))
    return (gpus - best, best) if wrong == "order" else (best, gpus - best)


def split_cases(draw: Draw) -> Iterator[tuple]:
    """Some in which every slip gives another division; each edge once; then at random. Powers of two, so exact."""
    yield 32, 0.375, 13, 0.08984375, 0.0009765625, 32, 0.093017578125  # balanced just above 16 and 16
    yield 18, 0.3125, 17, 0.01953125, 0.0107421875, 16, 0.041015625  # 8.8 prefill GPUs would be the balance
    yield 14, 0.296875, 17, 0.015625, 0.009765625, 16, 0.04248046875  # a batch of 2.75 would be on target
    yield 53, 0.078125, 9, 0.03515625, 0.00390625, 32, 0.046875  # the target limits the batch, to the bit
    yield 53, 0.140625, 9, 0.01953125, 0.0107421875, 2, 0.126953125  # its own limit does
    yield 8, 0.578125, 13, 0.0390625, 0.001953125, 8, 0.04296875  # 5.5 prefill GPUs would be the balance
    yield 2, 0.25, 10, 0.03125, 0.0078125, 8, 0.0625
    yield 4, 0.5, 3, 0.03125, 0.0078125, 8, 0.0625  # prompts need three
    yield 4, 0.125, 129, 0.03125, 0.0078125, 8, 0.0625  # answers need three
    yield 10, 0.5, 17, 0.03125, 0.0078125, 4, 1.0  # on target, limit and ties
    yield 9, 0.5, 9, 0.125, 0.0625, 64, 0.25  # a step on target to the bit: a batch of 2
    yield 12, 0.5, 2, 0.25, 0.03125, 8, 0.5  # one decode step
    yield 3, 0.5, 2, 0.25, 0.25, 1, 0.5  # both divisions serve equally many
    for _ in range(40):
        base = draw.randrange(1, 16) / 256
        each = draw.randrange(1, 16) / 1024
        tpot = base + each * (draw.randrange(1, 40) + draw.choice([0, 0.25, 0.5, 0.75]))  # few are hit to the bit
        lengths = draw.randrange(1, 64) / 64, draw.choice([2, 5, 13, 64, 129])
        gpus, rest = draw.randrange(3, 40), (lengths[1], base, each, draw.choice([1, 4, 16, 64]), tpot)
        near = {right_split(gpus, lengths[0] * factor, *rest) for factor in (1 - 1e-9, 1 + 1e-9)}
        if len(near) == 1:  # else it is a tie, and the last bit of a rounding decides it
            yield gpus, lengths[0], *rest


def split_slip(slip: str) -> Callable:
    """`right_split` with one slip."""
    return lambda *case: right_split(*case, wrong=slip)


SPLIT_MISTAKES = {
    "rounding the ratio down can miss the best division: try them all": split_slip("floored"),
    "the step of that batch is longer than tpot: the largest batch that stays within it is asked for": split_slip(
        "over target"
    ),
    "prefill GPUs come first in the pair": split_slip("order"),
    "the phases are mixed up: prompts limit the prefill GPUs, answers the decode GPUs": split_slip("swapped"),
    "the slower phase sets the pace: take the smaller of the two rates, not their sum": split_slip("sum"),
    "a step serves the whole batch, not one request": split_slip("one at a time"),
    "an answer needs many steps: a batch is done after tokens - 1 of them": split_slip("each step"),
    "the step of a full batch takes base + each * batch": split_slip("base only"),
    "the step is as long as its batch makes it; the target is only its limit": split_slip("target"),
    "the batch must keep its step within tpot": split_slip("no target"),
    "the batch has a limit of its own": split_slip("no limit"),
    "a step that is on target to the bit is within it": split_slip("strictly"),
    "the first token comes from the prefill: tokens - 1 steps are left": split_slip("first token"),
    "of two divisions that serve equally many, the one with fewer prefill GPUs is asked for": split_slip("ties"),
    "rounding the ratio can miss the best division: try them all": split_slip("rounded"),
    "the first division in which the prefill GPUs keep up, or the ratio rounded up, can miss the best one: try them "
    "all": split_slip("ceiled"),
    "the prefill keeps other GPUs busy: a decode GPU's time goes into its steps alone": split_slip("prefill too"),
}


def division(short_prefill: str, most_decode: int, slow_link: str, conclusion: str) -> None:
    """Exercise "The wrong half": what the tables show."""
    first = "the first token comes at the end of the prefill, after the queue in front of it"
    choice(short_prefill, "TTFT", {"TTFT": "", "TPOT": f"{first}; look at the first load"}, name="short_prefill")
    work_out(
        "most_decode",
        most_decode,
        3,
        {1: "that is the most crowded batch; read the rows of the second load", 2: "one division is better still"},
        unit="GPUs",
        tolerance=1e-6,
    )
    links = {
        "TPOT": "",
        "TTFT": "the first token does not wait for the transfer here; compare the columns of the second table",
        "both": "one of the two columns of the second table does not change",
    }
    choice(slow_link, "TPOT", links, name="slow_link")
    remedies = {
        "turn a prefill GPU into a decode GPU": "",
        "turn a decode GPU into a prefill GPU": "that would crowd the decode side even more",
        "cut prompts into chunks": "prompts share no step with decodes here, so they cannot lengthen one",
    }
    choice(conclusion, "turn a prefill GPU into a decode GPU", remedies, name="conclusion")
