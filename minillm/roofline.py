"""The roofline: what a step must cost on a device, from bytes, operations and three numbers.

A step moves bytes and does arithmetic. Each has its peak rate, and the slower of the two sets the time
(Williams, Waterman & Patterson, "Roofline", 2009; for decoding: kipply, "Transformer Inference Arithmetic",
2022). A third part, overhead, is time in which neither happens (He, "Making Deep Learning Go Brrrr", 2022).

Units: bytes, seconds, operations (a multiply and an add count as two), bytes per second (`bandwidth`) and
operations per second (`flops`). Giga and tera are powers of ten. All bounds are optimistic: they count what
must be read at least once, and leave out activations, softmax, norms and other work on single values.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from minillm.config import SCALE_GROUP, ModelConfig, bits_per_value
from minillm.model import Transformer
from minillm.naive import NoCache


@dataclass(frozen=True)
class Device:
    """Peak rates of one accelerator or computer.

    `bandwidth` in bytes/s; `flops` maps a dtype's name to dense operations/s; `memory` in bytes, infinite where
    unknown; `overhead` in seconds per step and `layer_overhead` in seconds per layer, both spent before and between
    the work (no datasheet states them: 0 there); `copy_bandwidth` in bytes/s, read plus written, where it was
    measured; `source` says where the numbers are from. Raises ValueError for a rate that is not positive.
    """

    name: str
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    memory: float
    source: str
    overhead: float = 0.0
    layer_overhead: float = 0.0
    copy_bandwidth: float | None = None

    def __post_init__(self):
        rates = [("bandwidth", self.bandwidth), ("memory", self.memory), *self.flops.items()]
        for what, rate in rates:
            if not rate > 0:
                raise ValueError(f"{what} of {self.name} must be positive, got {rate!r}")
        for what, seconds in (("overhead", self.overhead), ("layer_overhead", self.layer_overhead)):
            if not seconds >= 0:
                raise ValueError(f"{what} of {self.name} must be 0 or more seconds, got {seconds!r}")

    def peak(self, dtype) -> float:
        """Operations per second in `dtype`; raises ValueError where this device has no figure for it."""
        if dtype_name(dtype) not in self.flops:
            known = ", ".join(self.flops)
            raise ValueError(f"no arithmetic peak of {self.name} for {dtype_name(dtype)!r}; it has {known}")
        return self.flops[dtype_name(dtype)]

    def ridge(self, dtype="bfloat16") -> float:
        """Operations per byte at which arithmetic and memory take equally long: peak(dtype) / bandwidth."""
        return self.peak(dtype) / self.bandwidth

    @staticmethod
    def datasheet(name: str) -> Device:
        """Published peaks of a named device, the source in `.source`; raises ValueError that lists the names."""
        if name not in DATASHEETS:
            raise ValueError(f"unknown device {name!r}; there are {', '.join(DATASHEETS)}")
        return DATASHEETS[name]

    @classmethod
    def measure(cls, device: str | torch.device = "cpu", dtype="float32", name: str | None = None) -> Device:
        """This machine, measured in about three seconds; every figure is a median.

        `bandwidth` is what a matrix-vector product reads per second: decoding is made of those. `copy_bandwidth`
        is a plain copy, read and written bytes together. Both walk a buffer of 256 MiB on a CPU and 1 GiB
        elsewhere, several times the usual last-level cache. `flops[dtype]` is a square matrix product,
        `layer_overhead` an empty step: one token through a model too narrow for its work to take time, over its
        layers. Raises ValueError for a dtype that is not floating.
        """
        device, kind = torch.device(device), getattr(torch, dtype_name(dtype), None)
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            raise ValueError(f"cannot measure {dtype_name(dtype)!r}; use float32, bfloat16, float16 or float64")
        with torch.no_grad():
            read, copied = measure_bandwidth(device, kind)
            n = 1024 if device.type == "cpu" else 8192
            a, b = (torch.rand(n, n, device=device).to(kind) for _ in range(2))
            flops = {dtype_name(dtype): 2 * n**3 / median_seconds(lambda: a @ b, device)}
            empty = measure_layer_overhead(device, kind)
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
        name = name or f"this machine ({device}, {torch.get_num_threads()} threads)"
        return cls(name, read, flops, memory, "measured here", layer_overhead=empty, copy_bandwidth=copied)


_A100 = "NVIDIA A100 datasheet, SXM4, dense (not the 624 with sparsity)"
_HOPPER = "SXM, half of the 1,979 TFLOP/s it prints with sparsity"

DATASHEETS = {
    device.name: device
    for device in (
        Device("A100-40GB", 1555e9, {"bfloat16": 312e12, "float16": 312e12}, 40e9, _A100),
        Device("A100-80GB", 2039e9, {"bfloat16": 312e12, "float16": 312e12}, 80e9, _A100),
        Device("H100", 3350e9, {"bfloat16": 989.4e12, "float16": 989.4e12}, 80e9, f"NVIDIA H100 datasheet, {_HOPPER}"),
        Device("H200", 4800e9, {"bfloat16": 989e12}, 141e9, f"NVIDIA H200 page, {_HOPPER}"),
        Device("RTX 4090", 1008e9, {"bfloat16": 165.2e12}, 24e9, "NVIDIA Ada whitepaper, appendix A: dense, fp32 sums"),
        Device("RTX 5090", 1792e9, {"bfloat16": 209.5e12}, 32e9, "NVIDIA RTX Blackwell whitepaper, table 3: dense"),
        Device("L4", 300e9, {"bfloat16": 121e12}, 24e9, "NVIDIA L4 page, half of the 242 it prints with sparsity"),
        Device("laptop", 50e9, {"bfloat16": 5e11, "float32": 5e11}, 16e9, "an assumption: round numbers for a CPU"),
    )
}


@dataclass(frozen=True)
class StepCost:
    """What one step moves and computes, and how long it should take (a bound where the device's overhead is 0).

    `weight_bytes` and `kv_bytes` in bytes, `flops` in operations, the three times in seconds.
    """

    weight_bytes: float
    kv_bytes: float
    flops: float
    memory_time: float
    compute_time: float
    overhead: float

    @property
    def bytes(self) -> float:
        """Everything the step moves between memory and processor."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte moved: the horizontal axis of a roofline."""
        return self.flops / self.bytes

    @property
    def time(self) -> float:
        """Seconds: the slower of memory and arithmetic, and overhead, of which a GPU that is fed ahead hides a part."""
        return max(self.memory_time, self.compute_time) + self.overhead

    @property
    def time_in_turn(self) -> float:
        """Seconds if memory and arithmetic take turns instead; real kernels lie between this and `time`."""
        return self.memory_time + self.compute_time + self.overhead

    @property
    def bound(self) -> str:
        """Which part is the longest: "memory", "compute" or "overhead"."""
        parts = {"memory": self.memory_time, "compute": self.compute_time, "overhead": self.overhead}
        return max(parts, key=parts.get)


def step_cost(
    config: ModelConfig,
    device: Device,
    requests: Iterable[tuple[int, int]],
    dtype="bfloat16",
    kv_dtype=None,
    compute_dtype=None,
    sampled: int | None = None,
) -> StepCost:
    """Cost of one step that gives each request some tokens: a prefill, a decode, or any mix of them.

    `requests` holds (new_tokens, context) pairs: tokens to process, and tokens whose keys and values are
    stored already. A decode is (1, context), a whole prompt is (length, 0). `dtype` is what weights are stored
    in, "int8" and "int4" included. Arithmetic runs in `compute_dtype` and the cache holds `kv_dtype`; both
    default to `dtype`, or to bfloat16 where the weights are integers. `sampled` rows go through the output
    head, which makes logits: one per request if None, 0 for a chunk in the middle of a prompt.

    Counted: every weight once, however many tokens share it (of an input embedding that is not the head, only the rows
    looked up); stored keys and values once, new ones written once; two operations per weight of every product, and
    4 * q_dim per layer for each pair of a new token and a token it sees, itself included.
    Raises ValueError for an empty step, a request without new tokens, a negative context, an unknown dtype.
    """
    tokens = pairs = stored = count = 0
    for new, context in requests:
        if not (isinstance(new, int) and isinstance(context, int)) or new < 1 or context < 0:
            raise ValueError(f"request {count} is ({new}, {context}); it needs 1 or more new tokens and context >= 0")
        tokens, stored, count = tokens + new, stored + new + context, count + 1
        pairs += new * context + new * (new + 1) // 2  # the i-th new token sees the context and i new tokens
    if not count:
        raise ValueError("a step needs at least one request, got none")
    sampled = count if sampled is None else sampled
    if not 0 <= sampled <= tokens:
        raise ValueError(f"sampled must be between 0 and the step's {tokens} tokens, got {sampled}")

    compute_dtype = dtype_name(compute_dtype or activation_dtype(dtype))
    read = weights_read(config, sampled) + tokens * config.dim
    weight_bytes = read * bytes_per_weight(dtype)
    kv_bytes = stored * config.kv_bytes_per_token(kv_dtype or compute_dtype)
    # Per layer: queries, keys and values; their output; gate, up and down. Norms and biases are no products.
    products = config.dim * (2 * config.q_dim + 2 * config.kv_dim + 3 * config.ffn_dim)
    flops = config.n_layers * (2 * tokens * products + 4 * config.q_dim * pairs)
    flops += 2 * sampled * config.vocab_size * config.dim
    return StepCost(
        weight_bytes,
        kv_bytes,
        flops,
        memory_time=(weight_bytes + kv_bytes) / device.bandwidth,
        compute_time=flops / device.peak(compute_dtype),
        overhead=device.overhead + device.layer_overhead * config.n_layers,
    )


def decode_step(config: ModelConfig, device: Device, batch=1, context=0, dtype="bfloat16", **options) -> StepCost:
    """One new token for each of `batch` requests that hold `context` tokens each; options as in `step_cost`."""
    if not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be 1 or more, got {batch!r}")
    return step_cost(config, device, [(1, context)] * batch, dtype, **options)


def prefill_step(config: ModelConfig, device: Device, tokens: int, context=0, dtype="bfloat16", **options) -> StepCost:
    """`tokens` prompt tokens of one request after `context` stored ones; options as in `step_cost`."""
    return step_cost(config, device, [(tokens, context)], dtype, **options)


def max_decode_rate(config: ModelConfig, device: Device, dtype="bfloat16") -> float:
    """Tokens per second that one request cannot exceed: bandwidth / bytes of the weights each token reads."""
    return device.bandwidth / (weights_read(config) * bytes_per_weight(dtype))


def crossover_batch(config: ModelConfig | None, device: Device, dtype="bfloat16", context: int = 0, **options) -> float:
    """Requests decoding together at which arithmetic takes as long as memory; not rounded.

    Without a config, weights alone: peak / bandwidth * bytes per weight / 2, since a weight serves each request
    with two operations. With one, every request also brings its keys and values: the answer grows with
    `context`, and is infinite where a request's own bytes take longer than its own operations.
    """
    peak = device.peak(options.get("compute_dtype") or activation_dtype(dtype))
    if config is None:
        return peak / device.bandwidth * bytes_per_weight(dtype) / 2
    one, two = (decode_step(config, device, batch, context, dtype, **options) for batch in (1, 2))
    own_bytes, own_flops = two.bytes - one.bytes, two.flops - one.flops
    gain = own_flops / peak - own_bytes / device.bandwidth  # how much faster arithmetic grows than traffic
    return (one.bytes - own_bytes) / device.bandwidth / gain if gain > 0 else math.inf


def weights_read(config: ModelConfig, sampled: int = 1) -> int:
    """Weights a step reads whole: all layers, and the head if any row is sampled; not an untied embedding."""
    unread = (0 if config.tie_embeddings else 1) + (0 if sampled else 1)
    return config.num_parameters() - unread * config.vocab_size * config.dim


def bytes_per_weight(dtype) -> float:
    """Bytes of one stored weight; in "int4" its share of the group's 16-bit scale included."""
    return (bits_per_value(dtype) + (16 / SCALE_GROUP if dtype_name(dtype) == "int4" else 0)) / 8


def activation_dtype(dtype) -> str:
    """The dtype of arithmetic and cache beside weights stored in `dtype`: itself, or bfloat16 for integers."""
    bits_per_value(dtype)  # refuses an unknown name
    return "bfloat16" if dtype_name(dtype).startswith("int") else dtype_name(dtype)


def dtype_name(dtype) -> str:
    """torch.float32 or "float32" -> "float32"."""
    return str(dtype).removeprefix("torch.")


def median_seconds(run: Callable[[], object], device: torch.device, budget: float = 0.35) -> float:
    """Median seconds of `run()` over at least five calls and about `budget` seconds, after two to warm up."""
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    calls = 1 if device.type == "cpu" else 10  # an accelerator is fed ahead of time, so that starting is not timed
    times: list[float] = []
    while len(times) < 7 or sum(times) < budget:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) / calls


def measure_bandwidth(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second read by a matrix-vector product, and read plus written by a copy."""
    columns = 8192
    rows = (2**28 if device.type == "cpu" else 2**30) // (columns * dtype.itemsize)
    # Written once: memory that was never written is one page of zeros, and reading that is free.
    matrix = torch.rand(256, columns, device=device).to(dtype).repeat(rows // 256, 1)
    vector, target = torch.rand(1, columns, device=device).to(dtype), torch.zeros_like(matrix)
    read = median_seconds(lambda: F.linear(vector, matrix), device)
    copied = median_seconds(lambda: target.copy_(matrix), device)
    return matrix.nbytes / read, 2 * matrix.nbytes / copied


def measure_layer_overhead(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds per layer of an empty step: one token through 16 layers of width 16."""
    config = ModelConfig(16, 16, n_layers=16, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=16, max_context=16)
    model = Transformer(config).initialize().to(device, dtype)
    token = torch.zeros(1, dtype=torch.long, device=device)
    return median_seconds(lambda: model(token, token, NoCache()), device) / config.n_layers
