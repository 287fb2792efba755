"""Checks for the exercises of chapter 2: a bound, three regimes, the time of a step, the free batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from minillm.config import ModelConfig
from minillm.lab import checks
from minillm.lab.answers import build, work_out
from minillm.lab.checks import Draw
from minillm.roofline import Device, crossover_batch, decode_step

# Conditions of "A bound on paper" and of "Which regime?". The exercises state them in words, and a test compares.
BILLION_WEIGHTS, CLAIMED_RATE = 7, 100
CARD = Device.datasheet("RTX 4090")
STARTING, BANDWIDTH, FLOPS = 10e-6, 1000e9, 100e12  # seconds, bytes a second, operations a second

REGIMES = {"memory", "compute", "overhead"}
# Bytes moved and operations done by each case of "Which regime?"; values take two bytes.
OPERATIONS = {
    "a": (2 * 4096**2 + 2 * 2 * 4096, 2 * 4096**2),
    "b": (2 * 3 * 4096**2, 2 * 4096**3),
    "c": (2 * 3 * 4096**2, 4096**2),
    "d": (2 * 3 * 4096, 4096),
    "e": (2 * 4096**2 + 2 * 2 * 128 * 4096, 2 * 128 * 4096**2),
}
FREE = 1.5  # a batch is nearly free while its step takes at most this many times as long as that of batch 1


def bound(rate16: float, rate4: float, bandwidth: float, batch4: float) -> None:
    """Exercise "A bound on paper": two rates, the bandwidth that a claim needs in GB/s, a crossover batch."""
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
    work_out(
        "bandwidth",
        bandwidth,
        CLAIMED_RATE * 2 * weights / 1e9,
        {
            CLAIMED_RATE * weights / 1e9: "each weight takes two bytes",
            CLAIMED_RATE * 2 * weights / 1e12: "that is TB/s; GB/s are asked for",
            CLAIMED_RATE * 2 * weights: "that is bytes per second; GB/s are asked for",
        },
        unit="GB/s",
    )
    ridge = CARD.ridge("bfloat16")
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


def regimes(answer: Mapping[str, str]) -> None:
    """Exercise "Which regime?": a regime for each of five operations."""
    for letter, (moved, done) in OPERATIONS.items():
        if isinstance(answer, Mapping) and letter in answer:
            memory, compute = moved / BANDWIDTH, done / FLOPS
            times = {"memory": memory, "compute": compute, "overhead": STARTING}
            longest = max(times, key=times.get)
            words = f"it moves {moved / 1e6:,.3g} MB and does {done / 1e9:,.3g} billion operations"
            reasons = {regime: f"{words}; how long does each take, and which is longest?" for regime in times}
            checks.choice(answer[letter], longest, reasons, name=f"operation {letter}")
        elif answer is None or answer is ...:
            raise checks.NotAnswered("not answered yet: regimes")
        else:
            raise checks.CheckFailed(f"regimes: expected a dict with the keys {', '.join(OPERATIONS)}, got {answer!r}")


def step_time(answer: Callable) -> None:
    """Exercise "The time of a step": (config, device, batch, context) -> (seconds, "memory" or "compute")."""
    build("step_time", answer, right_step_time, step_cases, STEP_MISTAKES, compare=close_enough)


def right_step_time(config: ModelConfig, device: Device, batch: int, context: int) -> tuple[float, str]:
    """What the book's cost model says of a decode step in bfloat16."""
    cost = decode_step(config, device, batch, context, "bfloat16")
    return cost.time, "memory" if cost.memory_time > cost.compute_time else "compute"


def close_enough(expected: tuple, given, *_: object) -> str | None:
    """Within 2%: norms and the looked-up embedding rows may be counted or left out."""
    return checks.difference(expected, given, 0.02)


def step_cases(draw: Draw) -> Iterator[tuple]:
    """Odd shapes, tied and not, one request and many, empty context and long; no case near the crossover.

    Five situations, each drawn until it is one: weights alone; keys and values as heavy as the weights, for one
    request and for many; arithmetic the longer part; overhead the longest.
    """

    def one(batch, context, ridge, tied, overhead=0.05):
        while True:
            group, kv_heads, size = draw.choice([1, 3, 4]), draw.choice([2, 5, 8]), draw.choice([64, 80, 96])
            dim = 32 * draw.randrange(24, 60)
            config = ModelConfig(
                draw.randrange(32_000, 64_000), dim, draw.randrange(9, 32), group * kv_heads, kv_heads, size,
                3 * dim + draw.randrange(99), max_context=1 << 20, tie_embeddings=tied,
            )  # fmt: skip
            bandwidth = draw.uniform(5e11, 5e12)
            work = config.weight_bytes("bfloat16") / bandwidth
            device = Device(
                "drawn", bandwidth, {"bfloat16": ridge * bandwidth}, 1e12, "drawn", overhead=overhead * work
            )
            seen = int(context * config.weight_bytes("bfloat16") / batch / config.kv_bytes_per_token("bfloat16"))
            cost = decode_step(config, device, batch, seen)
            if not 0.6 < cost.memory_time / cost.compute_time < 1.6:
                return config, device, batch, seen

    yield one(1, 0, draw.uniform(150, 300), tied=True)
    yield one(1, 0, draw.uniform(150, 300), tied=False)
    yield one(1, draw.uniform(0.8, 1.5), draw.uniform(400, 500), tied=True)
    yield one(draw.randrange(5, 20), draw.uniform(0.8, 1.5), draw.uniform(400, 500), tied=False)
    yield one(draw.randrange(60, 120), 0, draw.uniform(10, 30), tied=False)
    yield one(draw.randrange(2, 9), 0.2, draw.uniform(200, 300), tied=True, overhead=3)


def with_rule(
    weights: float = 1, kv: Callable = lambda batch: batch, products: float = 1, embedding: bool = False,
    overhead: float = 1, pairs: float = 1, both: Callable = max,
) -> Callable:  # fmt: skip
    """A step time with one rule changed: factors on its parts, requests whose cache is read, how two times combine."""

    def mistake(config: ModelConfig, device: Device, batch: int, context: int) -> tuple[float, str]:
        looked_up = 0 if config.tie_embeddings or embedding else config.vocab_size * config.dim
        read = weights * 2 * (config.num_parameters() - looked_up)
        read += kv(batch) * (context + 1) * config.kv_bytes_per_token("bfloat16")
        attention = 4 * config.n_layers * config.q_dim * (context + 1)
        done = batch * (products * config.flops_per_token(0) + pairs * attention)
        memory, compute = read / device.bandwidth, done / device.peak("bfloat16")
        return both(memory, compute) + overhead * device.overhead, "memory" if memory > compute else "compute"

    return mistake


STEP_MISTAKES = {
    "memory and arithmetic overlap: the longer of the two counts, not their sum": with_rule(both=lambda a, b: a + b),
    "the shorter of the two times is taken; the step ends with the longer one": with_rule(both=min),
    "the device's overhead is missing: add it to the longer of the two times": with_rule(overhead=0),
    "an untied input embedding is looked up, not read: leave out its vocab_size * dim weights": with_rule(
        embedding=True
    ),
    "a bfloat16 weight takes two bytes": with_rule(weights=0.5),
    "the weights are read once for the whole batch, not once for each request": lambda config, device, batch, context: (
        with_rule(weights=batch)(config, device, batch, context)
    ),
    "the keys and values of the context are missing: each step reads them all": with_rule(kv=lambda batch: 0),
    "each request has keys and values of its own: multiply their bytes by the batch": with_rule(kv=lambda batch: 1),
    "the weights are used once for each request: multiply the operations by the batch": (
        lambda config, device, batch, context: with_rule(products=1 / batch, pairs=1 / batch)(
            config, device, batch, context
        )
    ),
    "a multiply and an add count as two operations per weight": with_rule(products=0.5),
}


def free_batch(seconds: Mapping[int, float], largest: int, speedup: float) -> None:
    """Exercise "Is a second request free?", your machine: `seconds` per step by batch, as the reader measured them."""
    if any(value is None or value is ... for value in (largest, speedup)):
        raise checks.NotAnswered("not answered yet: largest and speedup")
    free = [batch for batch, time in seconds.items() if time <= FREE * seconds[1]]
    measured = ", ".join(f"{batch}: {time / seconds[1]:.2f}" for batch, time in seconds.items())
    if largest != max(free):
        raise checks.CheckFailed(
            f"largest: {largest!r} is not right; your steps took, as multiples of that of batch 1, {measured}. "
            f"Take the largest batch with at most {FREE:g}"
        )
    gain = largest * seconds[1] / seconds[largest]
    work_out(
        "speedup",
        speedup,
        gain,
        {
            seconds[largest] / seconds[1]: "that is how much longer the step takes; how many more tokens does it make?",
            largest: "that would be so if the step took no longer at all; divide by how much longer it took",
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
