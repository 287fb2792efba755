"""Checks for the exercises of chapter 2: a bound, three regimes, the largest batch, the free batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from minillm.config import ModelConfig
from minillm.lab import checks
from minillm.lab.answers import build, work_out
from minillm.lab.checks import Draw
from minillm.roofline import Device, crossover_batch, decode_step

# Conditions of "A bound on paper" and of "Which regime?". The exercises state them in words, and a test compares.
BILLION_WEIGHTS, CLAIMED_RATE = 7, 100
CARD = Device.datasheet("RTX 4090")
STARTING, BANDWIDTH, FLOPS = 10e-6, 1000e9, 100e12  # seconds, bytes a second, operations a second

# Bytes moved and operations done by each case of "Which regime?"; values take two bytes.
OPERATIONS = {
    "a": (2 * 4096**2 + 2 * 2 * 4096, 2 * 4096**2),
    "b": (2 * 3 * 4096**2, 2 * 4096**3),
    "c": (2 * 3 * 4096**2, 4096**2),
    "d": (2 * 3 * 4096, 4096),
    "e": (2 * 4096**2 + 2 * 2 * 128 * 4096, 2 * 128 * 4096**2),
}
MOST = 500  # requests; no case of "The largest batch" has room and time for as many
FREE = 1.5  # a doubling of the batch is nearly free while the step takes at most this many times as long


def bound(rate16: float, rate4: float, bandwidth: float, batch4: float) -> None:
    """Exercise "A bound on paper": two rates, the bandwidth that a claim needs in GB/s, a crossover batch."""
    bound_of_one(rate16, rate4)
    weights, ridge = BILLION_WEIGHTS * 1e9, CARD.ridge("bfloat16")
    work_out(
        "bandwidth",
        bandwidth,
        CLAIMED_RATE * 2 * weights / 1e9,
        {
            CLAIMED_RATE * weights / 1e9: "each weight takes two bytes",
            CLAIMED_RATE * 4 * weights / 1e9: "that counts four bytes for each weight; 16 bits are two",
            CLAIMED_RATE * 2 * weights / 1e12: "that is TB/s; GB/s are asked for",
            CLAIMED_RATE * 2 * weights: "that is bytes per second; GB/s are asked for",
        },
        unit="GB/s",
    )
    work_out(
        "batch4",
        batch4,
        crossover_batch(None, CARD, "int4"),
        {
            ridge: "that is the crossover for 16-bit weights: fewer bytes a weight, an earlier crossover",
            ridge / 4: "that leaves out the scales: a weight takes 4.125 bits, not 4",
            ridge * 4.125 / 8: "a weight takes part in two operations per request: a multiply and an add",
            2 * ridge * 4.125 / 8: "each request brings two operations per weight: divide by two, not multiply",
        },
        unit="requests",
        tolerance=0.02,
    )


def bound_of_one(rate16: float, rate4: float) -> None:
    """The first half of `bound`: tokens per second of one request, with weights in 16 and in 4 bits."""
    weights, peak = BILLION_WEIGHTS * 1e9, CARD.peak("bfloat16")
    work_out(
        "rate16",
        rate16,
        CARD.bandwidth / (2 * weights),
        {
            CARD.bandwidth
            / weights: "16 bits are two bytes: each token reads twice as many bytes as there are weights",
            CARD.bandwidth / (16 * weights): "that divides by bits; bandwidth counts bytes",
            peak / (2 * weights): "that is the bound of arithmetic; for one request reading the weights takes longer",
            2 * weights / CARD.bandwidth: "that is seconds per token; its inverse is asked for",
        },
        unit="tokens/s",
    )
    work_out(
        "rate4",
        rate4,
        CARD.bandwidth / (weights * 4.125 / 8),
        {
            CARD.bandwidth / (weights / 2): "that leaves out the scales: 16 bits for each group of 128 weights",
            CARD.bandwidth / (weights * 20 / 8): "16 bits for each group of 128: an eighth of a bit for each weight",
            CARD.bandwidth / (weights * 4.125): "4.125 bits are not bytes: divide by 8",
        },
        unit="tokens/s",
    )


def regimes(answer: Mapping[str, str]) -> None:
    """Exercise "Which regime?": a regime for each of five operations."""
    if answer is None or answer is ...:
        raise checks.NotAnswered("not answered yet: regimes")
    if not isinstance(answer, Mapping) or not set(OPERATIONS) <= set(answer):
        raise checks.CheckFailed(f"regimes: expected a dict with the keys {', '.join(OPERATIONS)}, got {answer!r}")
    for letter, (moved, done) in OPERATIONS.items():
        times = {"memory": moved / BANDWIDTH, "compute": done / FLOPS, "overhead": STARTING}
        words = f"it moves {moved / 1e6:,.3g} MB and does {done / 1e9:,.3g} billion operations"
        reasons = dict.fromkeys(times, f"{words}; how long does each take, and which is longest?")
        checks.choice(answer[letter], max(times, key=times.get), reasons, name=f"operation {letter}")


def largest_batch(answer: Callable) -> None:
    """Exercise "The largest batch": (config, device, context, limit in seconds) -> (batch, "room" or "time")."""
    build("largest_batch", answer, right_batch, batch_cases, BATCH_MISTAKES, same_batch)


def same_batch(expected: tuple, given: object, config: ModelConfig, device: Device, *_: object) -> str | None:
    """What is wrong with the pair, and the sizes that decide about room: a model says little when it is printed."""
    wrong = checks.difference(expected, given)
    return wrong and (
        f"{wrong}\n  where the weights take {config.weight_bytes('bfloat16'):,.0f} bytes, a token's keys and values "
        f"{config.kv_bytes_per_token('bfloat16'):,.0f}, and the memory has {device.memory:,.0f}"
    )


def right_batch(config: ModelConfig, device: Device, context: int, limit: float, *, wrong: str = "") -> tuple[int, str]:
    """Requests that fit beside the weights and into a step of `limit` seconds; `wrong` names a slip to make."""
    held = {"no weights": 0, "weights read": decode_step(config, device, 1, context).weight_bytes}
    free = device.memory - held.get(wrong, config.weight_bytes("bfloat16"))
    per_request = config.kv_bytes_per_token("bfloat16") * (context if wrong == "old tokens" else context + 1)
    room = math.inf if wrong == "no room" else free // per_request
    stored = context + {"one more": 1, "one less": -1}.get(wrong, 0)
    if wrong == "below zero" and free < 0:
        return int(free // per_request), "room"
    for batch in range(1 if wrong == "at least one" else 0, MOST):
        if batch + 1 > room:
            return batch, "room"
        if wrong != "no time" and decode_step(config, device, batch + 1, stored).time > limit:
            return batch, "time"
    return MOST, ""  # only a slip that drops a limit comes this far


def batch_cases(draw: Draw) -> Iterator[tuple]:
    """Stopped by room, by time at the memory clock and at the compute clock; by either at once; weights too large.

    Where many requests with next to nothing stored are stopped by time, one token more or less for each decides.
    An input embedding of its own is at least 49 MB that a step does not read: more than two requests of 200 tokens.
    """

    def one(room: int, time: int, context: int, ridge: float = 300.0, tied: bool = True) -> tuple:
        """A model and a device on which `room` requests fit, and `time` requests are quick enough."""
        kv_heads, size, dim = draw.choice([2, 5, 8]), draw.choice([64, 80, 96]), 32 * draw.randrange(24, 60)
        config = ModelConfig(
            draw.randrange(32_000, 64_000), dim, draw.randrange(9, 32), draw.choice([1, 3]) * kv_heads, kv_heads, size,
            3 * dim + draw.randrange(99), max_context=1 << 20, tie_embeddings=tied,
        )  # fmt: skip
        kept = (context + 1) * config.kv_bytes_per_token("bfloat16")
        memory, bandwidth = config.weight_bytes("bfloat16") + (room + 0.5) * kept, draw.uniform(5e11, 5e12)
        device = Device("drawn", bandwidth, {"bfloat16": ridge * bandwidth}, memory, "drawn", overhead=1e-4)
        longer = decode_step(config, device, time + 1, context).time
        shorter = decode_step(config, device, time, context).time if time else 0.0
        limit = (shorter + longer) / 2
        return config, device, context, limit

    few, many = draw.randrange(3, 20), draw.randrange(25, 60)
    yield one(few, many, draw.randrange(500, 2000))
    yield one(many, few, draw.randrange(500, 2000))
    yield one(few, 3 * many, draw.randrange(100, 200), tied=False)
    yield one(few, 3 * many, 2)
    yield one(3 * many, many, draw.randrange(2, 6), tied=False)
    yield one(2 * many, many, draw.randrange(20, 90), ridge=draw.uniform(5, 15))
    yield one(0, many, draw.randrange(500, 2000))
    yield one(many, 0, draw.randrange(500, 2000))
    config, device, context, limit = one(few, many, draw.randrange(500, 2000))
    yield config, replace(device, memory=0.9 * config.weight_bytes("bfloat16")), context, limit


def one_more(config: ModelConfig, device: Device, context: int, limit: float) -> tuple[int, str]:
    """The first batch that does not work."""
    batch, reason = right_batch(config, device, context, limit)
    return batch + 1, reason


def with_slip(slip: str) -> Callable:
    """`right_batch` with one slip."""
    return lambda *case: right_batch(*case, wrong=slip)


def other_reason(*case) -> tuple[int, str]:
    """The right batch, the wrong limit."""
    batch, reason = right_batch(*case)
    return batch, {"room": "time", "time": "room"}[reason]


BATCH_MISTAKES = {
    "where not even one request satisfies both limits, the answer is 0": with_slip("at least one"),
    "that is the first batch that does not work; the largest that does is one less": one_more,
    "the batch is right; name the limit that one request more would break": other_reason,
    "after the step each request holds context + 1 tokens": with_slip("old tokens"),
    "`decode_step` takes the tokens stored before the step: `context`, not one more": with_slip("one more"),
    "`decode_step` takes the tokens stored before the step: `context`, not one less": with_slip("one less"),
    "all weights are in memory, also the rows of the embedding that a step does not read": with_slip("weights read"),
    "this batch does not fit: the memory must hold the weights, and the keys and values of every request": (
        with_slip("no room")
    ),
    "this batch does not fit: the memory must hold the weights as well": with_slip("no weights"),
    "the weights alone do not fit: then the answer is 0, not fewer": with_slip("below zero"),
    "this batch is too slow: ask for the time of a step of the whole batch": with_slip("no time"),
}


def free_batch(seconds: Mapping[int, float], last: int, speedup: float) -> None:
    """Exercise "Is a second request free?", your machine: `seconds` per step by batch, as the reader measured them."""
    if any(value is None or value is ... for value in (last, speedup)):
        raise checks.NotAnswered("not answered yet: last and speedup")
    cost = {batch: time / seconds[batch // 2] for batch, time in seconds.items() if batch > 1}
    if last != max((batch for batch, times in cost.items() if times <= FREE), default=1):
        measured = ", ".join(f"{batch // 2} to {batch}: {times:.3f}" for batch, times in cost.items())
        raise checks.CheckFailed(
            f"last: {last!r} is not right; your doublings cost, in times the step before, {measured}. Take the last "
            f"with at most {FREE:g}, and of it the batch after doubling, or 1 where there is none"
        )
    print(f"✓ last: {last}")
    most = max(seconds)
    gain = most * seconds[1] / seconds[most]
    work_out(
        "speedup",
        speedup,
        gain,
        {
            seconds[most] / seconds[1]: "that is how much longer the step takes; how many more tokens does it make?",
            most: "that would be so if the step took no longer at all; divide by how much longer it took",
            1 / gain: "that is the inverse",
        },
        unit="times the tokens/s of batch 1",
        tolerance=0.02,
    )


def long_context(kv_over_weights: float, conclusion: str) -> None:
    """Exercise "Is a second request free?", the cost model: where doubling the batch costs half as much again."""
    work_out(
        "kv_over_weights",
        kv_over_weights,
        1,
        {
            0.125: "that is one request's keys and values; take those of the batch of eight together",
            2: "that is the batch of sixteen; take the eight before doubling",
        },
        tolerance=0.05,
    )
    reasons = {
        "always": "your second table shows a doubling that costs half as much again, long before the crossover batch",
        "while the keys and values are small": "",
        "never": "in the first row of your second table doubling costs next to nothing",
    }
    checks.choice(conclusion, "while the keys and values are small", reasons, name="conclusion")
