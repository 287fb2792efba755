"""The cost model against hand arithmetic, PyTorch's own counts, and what must hold for any shape."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minillm.config import ModelConfig
from minillm.model import Transformer
from minillm.naive import NoCache
from minillm.roofline import (
    DATASHEETS,
    Device,
    bytes_per_weight,
    crossover_batch,
    decode_step,
    max_decode_rate,
    median_seconds,
    prefill_step,
    step_cost,
)

# q_dim 4, kv_dim 2. A layer's products: 4 * (4 + 2 + 2) + 4 * 4 + 3 * 4 * 6 = 120 weights, and 8 of norms.
# Two layers, the last norm (4) and one table of 10 * 4: 2 * 128 + 4 + 40 = 300 weights.
SMALL = ModelConfig(vocab_size=10, dim=4, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=2, ffn_dim=6, max_context=64)
ROUND = Device("round", bandwidth=100.0, flops={"float32": 1000.0, "bfloat16": 4000.0}, memory=1e6, source="test")


def test_decode_by_hand():
    cost = decode_step(SMALL, ROUND, batch=3, context=7, dtype="float32")
    assert cost.weight_bytes == (300 + 3 * 4) * 4  # all weights once, and three looked-up rows of 4
    assert cost.kv_bytes == 3 * (7 + 1) * 2 * 2 * 2 * 4  # 8 tokens each: keys and values * layers * kv_dim * 4 bytes
    # Products: 2 operations * 2 layers * 120 weights; head: 2 * 40; attention: 2 layers * 4 * q_dim 4 * 8 tokens seen.
    assert cost.flops == 3 * (480 + 80 + 256)
    assert cost.bytes == 1248 + 768 and cost.intensity == 2448 / 2016
    assert cost.memory_time == 20.16 and cost.compute_time == 2.448
    assert cost.time == 20.16 and cost.bound == "memory"


def test_prefill_by_hand():
    """Causal: of 5 tokens the first sees one and the last five, 15 pairs in all; only the last row is sampled."""
    cost = prefill_step(SMALL, ROUND, tokens=5, dtype="float32")
    assert cost.flops == 5 * 480 + 80 + 2 * 4 * 4 * 15
    assert cost.weight_bytes == (300 + 5 * 4) * 4
    assert cost.kv_bytes == 5 * 32
    chunk = prefill_step(SMALL, ROUND, tokens=2, context=3, dtype="float32", sampled=0)
    assert chunk.flops == 2 * 480 + 2 * 4 * 4 * (4 + 5)  # its tokens see 4 and 5; nothing goes through the head
    assert chunk.weight_bytes == (300 - 40 + 2 * 4) * 4  # nor is the tied table read, but for two rows
    assert chunk.kv_bytes == (3 + 2) * 32


def test_mixed_step_by_hand():
    cost = step_cost(SMALL, ROUND, [(1, 7), (5, 0), (2, 3)], "float32")
    assert cost.flops == 8 * 480 + 3 * 80 + 32 * (8 + 15 + 9)
    assert cost.weight_bytes == (300 + 8 * 4) * 4 and cost.kv_bytes == (8 + 5 + 5) * 32


def test_stored_in_fewer_bits():
    cost = decode_step(SMALL, ROUND, context=1, dtype="int4", kv_dtype="int8")
    assert cost.weight_bytes == (300 + 4) * (4 + 16 / 128) / 8  # each group of 128 adds a 16-bit scale
    assert cost.kv_bytes == 2 * 2 * 2 * 2 * 1
    assert cost.compute_time == cost.flops / 4000  # 4-bit weights are multiplied in bfloat16
    assert decode_step(SMALL, ROUND, dtype="int8", compute_dtype="float32").compute_time == (480 + 80 + 32) / 1000
    assert decode_step(SMALL, ROUND, dtype=torch.float32) == decode_step(SMALL, ROUND, dtype="float32")
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        assert bytes_per_weight(dtype) == SMALL.weight_bytes(dtype) / SMALL.num_parameters()


def test_untied_head():
    """An untied embedding is looked up, not read; the head, of the same size, is."""
    tied, untied = (decode_step(replace(SMALL, tie_embeddings=tie), ROUND, dtype="float32") for tie in (True, False))
    assert tied == untied


def test_overhead_adds_and_can_rule():
    slow = replace(ROUND, overhead=5.0, layer_overhead=10.0)
    cost = decode_step(SMALL, slow, dtype="float32")
    assert cost.overhead == 5 + 2 * 10
    assert cost.time == cost.memory_time + 25 and cost.bound == "overhead"
    assert prefill_step(SMALL, ROUND, 64, dtype="float32").bound == "compute"


SHAPES = [
    dict(vocab_size=101, dim=24, n_layers=1, n_heads=6, n_kv_heads=2, head_dim=8, ffn_dim=40),
    dict(vocab_size=67, dim=33, n_layers=3, n_heads=5, n_kv_heads=1, head_dim=6, ffn_dim=51, tie_embeddings=False),
    dict(vocab_size=37, dim=16, n_layers=2, n_heads=3, n_kv_heads=3, head_dim=10, ffn_dim=29, qkv_bias=True),
    dict(vocab_size=53, dim=20, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=12, ffn_dim=31, qk_norm=True),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_operations_are_those_pytorch_counts(shape, tokens):
    """PyTorch's counter on a real forward; its attention is the full square, ours the triangle under it."""
    config = ModelConfig(**shape, max_context=32)
    model = Transformer(config).initialize(seed=tokens)
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        hidden = model(torch.randint(config.vocab_size, (tokens,)), torch.arange(tokens), NoCache())
        model.logits(hidden[-1:])
    full, causal = (4 * config.n_layers * config.q_dim * pairs for pairs in (tokens**2, tokens * (tokens + 1) // 2))
    assert prefill_step(config, ROUND, tokens).flops == counter.get_total_flops() - full + causal


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes_are_those_of_the_parameters(shape, dtype):
    config = ModelConfig(**shape, max_context=32)
    model = Transformer(config).to(dtype)
    held = sum(p.nbytes for p in model.parameters())
    unread = 0 if config.tie_embeddings else model.embedding.weight.nbytes
    row = model.embedding.weight[0].nbytes
    assert decode_step(config, ROUND, batch=3, dtype=dtype).weight_bytes == held - unread + 3 * row
    assert max_decode_rate(config, ROUND, dtype) == ROUND.bandwidth / (held - unread)


def test_article_and_kipply():
    """The article: about 1,800 tokens/s and a batch of about 117 on its GPU; kipply: 208 operations per byte."""
    gpu, post = Device.datasheet("RTX 5090"), ModelConfig.preset("post-0.5b")
    assert max_decode_rate(post, gpu) == pytest.approx(1792e9 / (2 * 489.3e6), rel=1e-4)  # 1,831
    assert round(gpu.ridge()) == 117 and round(crossover_batch(None, gpu)) == 117
    assert crossover_batch(post, gpu) == pytest.approx(117, rel=0.01)  # the new token's own key and value included
    kipply = Device("A100, rounded", bandwidth=1.5e12, flops={"bfloat16": 312e12}, memory=40e9, source="kipply 2022")
    assert crossover_batch(None, kipply) == pytest.approx(208)
    assert round(crossover_batch(None, Device.datasheet("A100-40GB"))) == 201  # with the sheet's 1,555 GB/s
    assert [round(Device.datasheet(n).ridge()) for n in ("A100-80GB", "H100", "H200", "RTX 4090", "L4")] == [
        153, 295, 206, 164, 403,
    ]  # fmt: skip


def test_opt_13b_reads_its_weights_in_16_7_ms():
    """26 GB over an A100-40GB's 1,555 GB/s (Anyscale 2023); ours is a gated layer, so two thirds of OPT's width."""
    shape = ModelConfig(50272, 5120, 40, 40, 40, 128, ffn_dim=20480 * 2 // 3, max_context=2048)
    cost = decode_step(shape, Device.datasheet("A100-40GB"))
    assert cost.memory_time == pytest.approx(16.7e-3, rel=0.02)
    assert shape.kv_bytes_per_token() == 800 * 1024


def test_crossover_is_where_the_times_meet():
    """A fractional batch cannot be run, but the two around it can."""
    gpu, post = Device.datasheet("RTX 5090"), ModelConfig.preset("post-0.5b")
    for context in (0, 100, 300):
        batch = crossover_batch(post, gpu, context=context)
        below, above = (decode_step(post, gpu, f(batch), context) for f in (math.floor, math.ceil))
        assert below.bound == "memory" and above.bound == "compute"
    # A request's own intensity falls with its context: (2 * 489e6 + 122,880 c) / (24,576 c) = 117 at c = 355.
    assert crossover_batch(post, gpu, context=350) < math.inf == crossover_batch(post, gpu, context=360)
    assert crossover_batch(None, gpu, "int8") == pytest.approx(gpu.ridge() / 2)


shapes = st.builds(
    lambda v, d, n, g, k, h, f, tie: ModelConfig(v, d, n, g * k, k, 2 * h, f, 64, tie_embeddings=tie),
    *(st.integers(1, top) for top in (300, 64, 5, 4, 4, 16, 99)),
    st.booleans(),
)
requests = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 500)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(shapes, requests, st.data())
def test_more_work_never_costs_less(config, step, data):
    cost = step_cost(config, ROUND, step)
    index = data.draw(st.integers(0, len(step) - 1))
    new, context = step[index]
    for changed in ((new + 1, context), (new, context + 1)):
        more = step_cost(config, ROUND, [*step[:index], changed, *step[index + 1 :]])
        assert more.flops > cost.flops and more.kv_bytes > cost.kv_bytes and more.time >= cost.time
    joined = step_cost(config, ROUND, [*step, (1, 0)])
    assert cost.flops < joined.flops and cost.time <= joined.time
    alone = step_cost(config, ROUND, [(1, 0)])  # sharing a step never costs more than two steps
    assert joined.flops == cost.flops + alone.flops and joined.bytes < cost.bytes + alone.bytes
    fewer_bits = step_cost(config, ROUND, step, "int8", kv_dtype="bfloat16")
    assert fewer_bits.weight_bytes == cost.weight_bytes / 2 and fewer_bits.time <= cost.time


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 60), st.integers(1, 60), st.integers(0, 99))
def test_chunks_do_the_work_of_the_whole(config, first, second, context):
    """Splitting a prompt leaves its operations as they were and reads the weights and the first part again."""
    whole = prefill_step(config, ROUND, first + second, context)
    chunks = (
        prefill_step(config, ROUND, first, context, sampled=0),
        prefill_step(config, ROUND, second, context + first),
    )
    assert sum(chunk.flops for chunk in chunks) == whole.flops
    assert sum(chunk.bytes for chunk in chunks) > whole.bytes


def test_measured_device():
    """The figures are noisy and not asserted; that they are there, and that a copy was timed too, is."""
    device = Device.measure("cpu", torch.float32)
    assert 1e8 < device.bandwidth < 1e13 and 1e8 < device.copy_bandwidth < 1e13
    assert 1e8 < device.peak("float32") < 1e16 and 0 < device.layer_overhead < 1 and device.memory > 1e8
    assert "cpu" in device.name and device.source == "measured here"
    with pytest.raises(ValueError, match="bfloat16.*it has float32"):
        device.peak("bfloat16")


def test_timer_takes_the_median_after_warming_up():
    calls = []
    median_seconds(lambda: calls.append(1), torch.device("cpu"), budget=0)
    assert len(calls) == 7


def test_datasheets_name_their_source():
    for name, device in DATASHEETS.items():
        assert device.name == name and len(device.source) > 15 and device.overhead == device.layer_overhead == 0
        assert hash(device) == hash(Device.datasheet(name))
    assert "assumption" in Device.datasheet("laptop").source


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: decode_step(SMALL, ROUND, batch=0), "batch must be 1 or more, got 0"),
        (lambda: decode_step(SMALL, ROUND, context=-1), r"\(1, -1\).*context >= 0"),
        (lambda: prefill_step(SMALL, ROUND, tokens=0), r"\(0, 0\).*1 or more new tokens"),
        (lambda: step_cost(SMALL, ROUND, [(1, 3), (2, -5)]), r"request 1 is \(2, -5\)"),
        (lambda: step_cost(SMALL, ROUND, []), "at least one request"),
        (lambda: step_cost(SMALL, ROUND, [(2, 0)], sampled=3), "between 0 and the step's 2 tokens, got 3"),
        (lambda: step_cost(SMALL, ROUND, [(2, 0)], sampled=-1), "got -1"),
        (lambda: decode_step(SMALL, ROUND, dtype="float8"), "unknown dtype 'float8'"),
        (lambda: decode_step(SMALL, ROUND, kv_dtype="int3"), "unknown dtype 'int3'"),
        (lambda: decode_step(SMALL, ROUND, dtype="float64"), "no arithmetic peak of round for 'float64'"),
        (lambda: Device.datasheet("A100"), "unknown device 'A100'; there are A100-40GB"),
        (lambda: Device.measure(dtype="int8"), "cannot measure 'int8'"),
        (lambda: Device.measure(dtype="linalg"), "cannot measure 'linalg'"),
        (lambda: replace(ROUND, bandwidth=0), "bandwidth of round must be positive, got 0"),
        (lambda: replace(ROUND, flops={"float32": math.nan}), "float32 of round must be positive, got nan"),
        (lambda: replace(ROUND, layer_overhead=-1.0), "layer_overhead of round must be 0 or more"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
