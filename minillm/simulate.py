"""The simulated runner: the same engine over a virtual clock, each step charged its roofline time.

`SimulatedRunner` takes the place of `ModelRunner`. It runs no model: it adds up what a step must move and compute on
a named device (`roofline.step_cost`), advances its clock by that time, and hands back placeholder tokens. Scheduler,
block pool and metrics are the ones of real runs, so a laptop can replay an experiment on hardware it does not have.

What it leaves out makes it optimistic: kernels that reach a part of the peaks, or read and compute in turn, the host's
work, activations, traffic between GPUs. Each has its explicit argument (an efficiency, an overhead), and none is set to
anything but the ideal unless the caller does. A simulated figure is a bound with stated assumptions, no measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from minillm.config import EngineConfig, ModelConfig, bits_per_value
from minillm.roofline import Device, StepCost, activation_dtype, decode_step, step_cost
from minillm.scheduler import Step

PLACEHOLDER = 0  # the token that a simulated step "draws"


class SimulatedRunner:
    """Charges each step its time on `device` for a model of shape `config`; the clock starts at 0 seconds.

    `engine` is the config that the `Engine` gets too; without `num_blocks` in it, the pool has what the device's
    memory holds (`num_blocks`, with `utilization` and `reserve_bytes`). `dtype` is what the weights are stored in,
    `kv_dtype` the cache, as in `step_cost`. `overhead` is a fixed time in seconds per step, in place of the device's
    own (0 for a datasheet) if it is not None. The efficiencies are the shares of the device's bandwidth and arithmetic
    peak that kernels are taken to reach. With `overlap` a step takes the longer of reading and computing, without it
    their sum, as if they took turns; real kernels are in between. Raises ValueError for a share that is not above 0 and
    at most 1, a negative overhead, a dtype that the device has no peak for, and where memory is needed and not one
    block fits.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        engine: EngineConfig = EngineConfig(),  # noqa: B008, it is frozen
        *,
        dtype="bfloat16",
        kv_dtype=None,
        overhead: float | None = None,
        bandwidth_efficiency: float = 1.0,
        compute_efficiency: float = 1.0,
        overlap: bool = True,
        utilization: float = 0.9,
        reserve_bytes: float = 0.0,
    ):
        self.overlap = overlap
        self.config, self.dtype, self.kv_dtype = config, dtype, kv_dtype
        self.device = assume(device, config, overhead, bandwidth_efficiency, compute_efficiency)
        self.device.peak(activation_dtype(dtype))
        if kv_dtype is not None:
            bits_per_value(kv_dtype)  # here, not in the first step
        self.block_size = engine.block_size  # the pool was counted in these
        self.num_blocks = engine.num_blocks or num_blocks(
            config, device, engine.block_size, dtype, kv_dtype, utilization, reserve_bytes
        )
        self._now = 0.0

    def now(self) -> float:
        """Seconds on the virtual clock."""
        return self._now

    def wait_until(self, moment: float) -> None:
        """Move the clock to `moment`, in seconds; one that has passed changes nothing. ValueError if not finite."""
        if not math.isfinite(moment):
            raise ValueError(f"cannot wait until {moment!r}: a moment is a finite number of seconds")
        self._now = max(self._now, moment)

    def cost(self, step: Step) -> StepCost:
        """What a scheduled step moves and computes; each request brings `count` tokens on top of those it stored.

        A request whose last prompt token is in the step passes the output head once, however many samples it draws.
        """
        pairs = [(n, request.num_computed_tokens) for request, n in zip(step.requests, step.counts, strict=True)]
        sampled = sum(drawn > 0 for drawn in step.samples)
        return step_cost(self.config, self.device, pairs, self.dtype, self.kv_dtype, sampled=sampled)

    def execute(self, step: Step) -> list[list[int]]:
        """Advance the clock by the step's time; `step.samples[i]` placeholder tokens for each request.

        The tokens mean nothing: requests should ask for a length with `ignore_eos`, as those of `make_workload` do.
        """
        cost = self.cost(step)
        self._now += cost.time if self.overlap else cost.time_in_turn
        return [[PLACEHOLDER] * drawn for drawn in step.samples]


def assume(
    device: Device,
    config: ModelConfig,
    overhead: float | None = None,
    bandwidth_efficiency: float = 1.0,
    compute_efficiency: float = 1.0,
) -> Device:
    """The device as a simulation takes it to be: shares of its peaks, and one overhead per step for this model."""
    if not isinstance(device, Device):
        raise ValueError(f'device must be a Device, such as Device.datasheet("A100-80GB"), got {device!r}')
    for name, share in (("bandwidth_efficiency", bandwidth_efficiency), ("compute_efficiency", compute_efficiency)):
        check_share(name, share)
    if overhead is not None and not (is_real(overhead) and 0 <= overhead < math.inf):
        raise ValueError(f"overhead must be 0 or more seconds per step, or None for the device's own; got {overhead!r}")
    own = device.overhead + device.layer_overhead * config.n_layers
    return replace(
        device,
        bandwidth=device.bandwidth * bandwidth_efficiency,
        flops={dtype: peak * compute_efficiency for dtype, peak in device.flops.items()},
        overhead=own if overhead is None else overhead,
        layer_overhead=0.0,
    )


def several(device: Device, count: int, efficiency: float = 1.0) -> Device:
    """`count` devices that share every layer (tensor parallel), as one: memory, bandwidth and peaks multiplied.

    `efficiency` is the share of the multiplied rates that is left after their traffic with each other: nothing is
    charged for that here, so 1 is a bound. Memory is multiplied in full.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"count must be an integer of at least 1, got {count!r}")
    check_share("efficiency", efficiency)
    return replace(
        device,
        name=f"{count} x {device.name}",
        bandwidth=device.bandwidth * count * efficiency,
        flops={dtype: peak * count * efficiency for dtype, peak in device.flops.items()},
        memory=device.memory * count,
        copy_bandwidth=device.copy_bandwidth and device.copy_bandwidth * count * efficiency,
    )


def num_blocks(
    config: ModelConfig,
    device: Device,
    block_size: int = 16,
    dtype="bfloat16",
    kv_dtype=None,
    utilization: float = 0.9,
    reserve_bytes: float = 0.0,
) -> int:
    """Cache blocks of `block_size` tokens that fit: (memory * utilization - weights - reserve) / bytes of a block.

    What `utilization` leaves out is for activations and the framework; `reserve_bytes` is set aside on top of it.
    Raises ValueError where the device's memory is not known, and where not one block fits.
    """
    check_share("utilization", utilization)
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise ValueError(f"block_size must be an integer of at least 1, got {block_size!r}")
    if not (is_real(reserve_bytes) and reserve_bytes >= 0):
        raise ValueError(f"reserve_bytes must be 0 or more, got {reserve_bytes!r}")
    if math.isinf(device.memory):
        raise ValueError(f"the memory of {device.name} is not known: set the number of blocks yourself")
    weights = config.weight_bytes(dtype)
    block = block_size * config.kv_bytes_per_token(kv_dtype or activation_dtype(dtype))
    left = device.memory * utilization - weights - reserve_bytes
    if left < block:
        raise ValueError(
            f"not one block of {block / 1e6:.2f} MB fits {device.name}: {utilization:.0%} of its "
            f"{device.memory / 1e9:.1f} GB, less {weights / 1e9:.1f} GB of weights and {reserve_bytes / 1e9:.1f} GB "
            f"of reserve, leaves {left / 1e9:.1f} GB; use more devices or fewer bits"
        )
    return int(left // block)


def padded_batch_times(
    config: ModelConfig,
    device: Device,
    lengths: Sequence[tuple[int, int]],
    batch_size: int,
    pad_to: str = "batch",
    dtype="bfloat16",
    overhead: float | None = None,
    bandwidth_efficiency: float = 1.0,
    compute_efficiency: float = 1.0,
) -> list[float]:
    """Seconds of each batch of a static server without a scheduler: `batch_size` requests in order, then the next.

    `lengths` holds (prompt, output) tokens of each request. Prompts are padded to the longest of their batch, and
    the batch decodes until its longest output is done (`pad_to="batch"`), or both go to the longest of ALL requests
    (`pad_to="all"`): the second is what the published baseline of Daniel et al. (2023) ran. Padding is computed and
    read like tokens (an `Engine` with batching="static" holds the places, but computes only what was asked for). The
    results of a batch are all there at its end; the sum is the makespan of a burst.
    Raises ValueError for no requests, lengths or a batch size below 1, and another `pad_to`.
    """
    if pad_to not in ("batch", "all"):
        raise ValueError(f'pad_to must be "batch" or "all", got {pad_to!r}')
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    for prompt, output in lengths:
        if not (isinstance(prompt, int) and isinstance(output, int) and prompt >= 1 and output >= 1):
            raise ValueError(f"lengths must hold pairs of positive integers, got ({prompt!r}, {output!r})")
    if not lengths:
        raise ValueError("lengths must hold at least one request, got none")
    device = assume(device, config, overhead, bandwidth_efficiency, compute_efficiency)

    @cache
    def decode(batch: int, context: int) -> float:
        return decode_step(config, device, batch, context, dtype).time

    times = []
    for start in range(0, len(lengths), batch_size):
        batch = lengths[start : start + batch_size]
        prompt, output = (max(column) for column in zip(*(lengths if pad_to == "all" else batch), strict=True))
        first = step_cost(config, device, [(prompt, 0)] * len(batch), dtype).time  # it draws the first token too
        times.append(first + sum(decode(len(batch), prompt + made) for made in range(output - 1)))
    return times


def crowd_times(
    config: ModelConfig, device: Device, dtype="bfloat16"
) -> Callable[[int, int, int, int], tuple[float, float, float]]:
    """`step_cost` of a crowd that nobody has to list: a function (tokens, stored, pairs, sampled) -> three times.

    A step's times are linear in four sums over its requests: new `tokens`, tokens `stored` in earlier steps, `pairs`
    of a new token and a token it sees (itself included), and the `sampled` rows that go through the output head. The
    function returns the seconds of reading, of computing and of overhead.
    """

    def measure(*requests: tuple[int, int], sampled: int = 0) -> tuple[float, float]:
        cost = step_cost(config, device, requests, dtype, sampled=sampled)
        return cost.memory_time, cost.compute_time

    one, two, longer, row = measure((1, 0)), measure((1, 0), (1, 0)), measure((1, 1)), measure((1, 0), sampled=1)
    read_token, read_stored, read_head = two[0] - one[0], longer[0] - one[0], row[0] - one[0]
    pair, sample = longer[1] - one[1], row[1] - one[1]
    weights, token = one[0] - read_token, one[1] - pair
    overhead = step_cost(config, device, [(1, 0)], dtype).overhead

    def times(tokens: int, stored: int, pairs: int, sampled: int) -> tuple[float, float, float]:
        reading = weights + read_token * tokens + read_stored * stored + (read_head if sampled else 0.0)
        return reading, token * tokens + pair * pairs + sample * sampled, overhead

    return times


def published_model(name: str) -> ModelConfig:
    """The shape of a published model, for arithmetic and simulation; raises ValueError that lists the names."""
    if not isinstance(name, str) or name not in PUBLISHED:
        raise ValueError(f"no published shape called {name!r}; there are {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


def shape(dim, layers, heads, kv_heads, head_dim, ffn_dim, vocab_size, max_context, tied=True) -> ModelConfig:
    """A `ModelConfig` in the order of the papers' tables."""
    return ModelConfig(vocab_size, dim, layers, heads, kv_heads, head_dim, ffn_dim, max_context, tie_embeddings=tied)


def two_matrices(width: int) -> int:
    """The SwiGLU width (three matrices) with the weights and operations of a feed-forward of two of this width."""
    return round(width * 2 / 3)


# Llama-like stand-ins for published shapes: cache bytes per token exact, weights (and so the operations on them) within
# 0.3% of what the real architecture has. Biases and learned positions, about 0.1%, are left out.
PUBLISHED = {
    # Zhang et al., OPT, 2022 (checkpoint facebook/opt-13b): two matrices of 4 * dim, learned positions.
    "OPT-13B": shape(5120, 40, 40, 40, 128, two_matrices(20_480), 50_272, 2048),
    # Brown et al., 2020, table 2.1; Yu et al., 2022, table 1: two matrices of 4 * dim, learned positions.
    "GPT-3 175B": shape(12_288, 96, 96, 96, 128, two_matrices(49_152), 50_257, 2048),
    # Checkpoint mistralai/Mistral-7B-v0.1, exact. Its window of 4,096 tokens is not modelled.
    "Mistral-7B": shape(4096, 32, 32, 8, 128, 14_336, 32_000, 32_768, tied=False),
    # Checkpoint 01-ai/Yi-34B, exact.
    "Yi-34B": shape(7168, 60, 56, 8, 128, 20_480, 64_000, 4096, tied=False),
    # Checkpoint tiiuae/falcon-180B: two matrices of 4 * dim beside the attention, not after it (the sum is the same).
    "Falcon-180B": shape(14_848, 80, 232, 8, 64, two_matrices(59_392), 65_024, 2048),
    # Checkpoint meta-llama/Llama-2-70b-hf, exact.
    "Llama-2 70B": shape(8192, 80, 64, 8, 128, 28_672, 32_000, 4096, tied=False),
    # Pope et al., 2022, table D.1, and Chowdhery et al., 2022: SwiGLU beside a multi-query attention, tied embeddings.
    "PaLM 540B": shape(18_432, 118, 48, 1, 256, 73_728, 256_000, 2048),
    # Raffel et al., 2020 (T5 v1.1 XXL), one of its two halves. A decoder layer reads, beside its own attention and
    # gated feed-forward of 10,240, the queries and output of cross-attention (2 * dim**2: here 2/3 * dim of width).
    # An encoder layer with the keys and values that it hands to the decoder has just as many weights, so a prompt
    # costs what the source text does. Memory holds both halves: set 10.9 GB (bf16) aside for the other.
    "T5-XXL": shape(4096, 24, 64, 64, 64, 10_240 + two_matrices(4096), 32_128, 4096, tied=False),
    # Hoffmann et al., 2022, table 4: two matrices of 4 * dim, and relative positions (Dai et al., 2019), whose
    # projection of dim**2 a layer brings 64.7 to the published 70 billion. Together 9 * dim**2: a width of 3 * dim.
    "Chinchilla-70B": shape(8192, 80, 64, 64, 128, 3 * 8192, 32_000, 2048),
}


def check_share(name: str, value: float) -> None:
    """Raises ValueError unless 0 < value <= 1."""
    if not (is_real(value) and 0 < value <= 1):
        raise ValueError(f"{name} must be above 0 and at most 1, got {value!r}")


def is_real(value) -> bool:
    """True for an int or a float; a bool is neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
