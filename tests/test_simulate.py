"""The simulated runner against arithmetic written out, and published shapes against `transformers` and the papers."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    T5Config,
)

from benchmarks import simulate as benchmark
from minillm.config import EngineConfig, ModelConfig
from minillm.engine import Engine
from minillm.metrics import summarize
from minillm.roofline import Device, step_cost
from minillm.sampling import SamplingParams
from minillm.simulate import (
    PUBLISHED,
    SimulatedRunner,
    crowd_times,
    num_blocks,
    padded_batch_times,
    published_model,
    several,
)
from minillm.workload import TimedRequest, fixed, make_workload, poisson, replay, uniform

OPT, A100 = published_model("OPT-13B"), Device.datasheet("A100-40GB")
# OPT-13B by hand. Products of a layer: 4 * 5120^2 of attention + 3 * 5120 * 13,653; norms 2 * 5120 a layer and a last
# one; a tied table of 50,272 * 5120. A token leaves 2 * 40 layers * 5120 values of 2 bytes: 819,200 bytes.
PRODUCTS, TABLE = 40 * 314_567_680, 257_392_640
WEIGHTS = PRODUCTS + 40 * 10_240 + 5120 + TABLE  # 12,840,514,560
SMALL = ModelConfig(vocab_size=10, dim=4, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=2, ffn_dim=6, max_context=64)
ROUND = Device("round", bandwidth=100.0, flops={"float32": 1000.0, "bfloat16": 4000.0}, memory=1e6, source="test")


def step(*work):
    """A step of (tokens, computed before, drawn after) for each request."""
    requests = [SimpleNamespace(num_computed_tokens=stored) for _, stored, _ in work]
    return SimpleNamespace(requests=requests, counts=[n for n, _, _ in work], samples=[s for _, _, s in work])


def engine(config=SMALL, device=ROUND, trace=False, assumptions=None, **settings):
    settings = EngineConfig(**settings)
    return Engine(SimulatedRunner(config, device, settings, **(assumptions or {})), settings, trace=trace)


def test_one_decode_of_opt_13b_by_hand():
    """25.68 GB of weights, one looked-up row, and 513 tokens of 800 KiB, at 1,555 GB/s: 16.79 ms."""
    runner = SimulatedRunner(OPT, A100)
    assert runner.execute(step((1, 512, 1))) == [[0]]
    assert runner.now() == pytest.approx((25_681_029_120 + 10_240 + 513 * 819_200) / 1555e9, rel=1e-12)
    assert runner.now() == pytest.approx(0.016786, rel=1e-4)


def test_a_prompt_of_512_tokens_by_hand():
    """Arithmetic rules: 512 tokens through every product, one row through the head, 512 * 513 / 2 pairs: 42.0 ms."""
    runner = SimulatedRunner(OPT, A100)
    runner.execute(step((512, 0, 1)))
    flops = 2 * 512 * PRODUCTS + 2 * TABLE + 4 * 40 * 5120 * (512 * 513 // 2)
    assert runner.now() == pytest.approx(flops / 312e12, rel=1e-12)
    assert runner.now() == pytest.approx(0.04165, rel=2e-3)


def test_a_mixed_step_by_hand():
    """A decode, a chunk that draws nothing, and a prompt that ends and draws three samples from one row."""
    runner = SimulatedRunner(OPT, A100, overhead=0.002)
    assert runner.execute(step((1, 99, 1), (20, 40, 0), (10, 0, 3))) == [[0], [], [0, 0, 0]]
    pairs = 100 + (20 * 40 + 20 * 21 // 2) + 10 * 11 // 2
    cost = runner.cost(step((1, 99, 1), (20, 40, 0), (10, 0, 3)))
    assert cost.flops == 2 * 31 * PRODUCTS + 2 * 2 * TABLE + 4 * 40 * 5120 * pairs
    assert cost.weight_bytes == 2 * (WEIGHTS + 31 * 5120) and cost.kv_bytes == (100 + 60 + 10) * 819_200
    assert runner.now() == pytest.approx(cost.bytes / 1555e9 + 0.002)
    only_chunk = runner.cost(step((20, 40, 0)))
    assert only_chunk.weight_bytes == 2 * (WEIGHTS - TABLE + 20 * 5120)  # no row sampled: the head is not read


def test_efficiencies_and_overhead_are_what_they_say():
    """Half the bandwidth doubles a memory-bound step, a quarter of the peak quadruples a compute-bound one."""
    decode, prompt = step((1, 512, 1)), step((2048, 0, 1))
    ideal, shared = (
        SimulatedRunner(OPT, A100, **shares)
        for shares in ({}, {"bandwidth_efficiency": 0.5, "compute_efficiency": 0.25, "overhead": 0.003})
    )
    assert shared.cost(decode).time == pytest.approx(2 * ideal.cost(decode).time + 0.003)
    assert shared.cost(prompt).time == pytest.approx(4 * ideal.cost(prompt).time + 0.003)
    slow = replace(A100, overhead=0.001, layer_overhead=1e-4)
    assert SimulatedRunner(OPT, slow).cost(decode).overhead == pytest.approx(0.001 + 40 * 1e-4)
    assert SimulatedRunner(OPT, slow, overhead=0.0).cost(decode).time == ideal.cost(decode).time
    fewer = SimulatedRunner(OPT, A100, dtype="int8", kv_dtype="int8").cost(decode)
    assert fewer.weight_bytes == WEIGHTS + 5120 and fewer.kv_bytes == 513 * 409_600


def test_without_overlap_reading_and_computing_take_turns():
    """Their sum in place of the longer one, and the overhead on top, for steps that either of them binds."""
    assumptions = {"compute_efficiency": 0.75, "bandwidth_efficiency": 0.65, "overhead": 0.002}
    for work in [(1, 99, 1)], [(512, 0, 1)], [(1, 99, 1), (20, 40, 0)]:
        runner = SimulatedRunner(OPT, A100, overlap=False, **assumptions)
        runner.execute(step(*work))
        cost = SimulatedRunner(OPT, A100, **assumptions).cost(step(*work))
        assert runner.now() == pytest.approx(cost.memory_time + cost.compute_time + 0.002) != pytest.approx(cost.time)


def test_the_engine_runs_on_the_virtual_clock():
    """One request: its timeline is the sum of the steps' costs. The clock jumps to an arrival, in no real time."""
    requests = [TimedRequest(1000.0, [1, 2, 3, 4, 5], SamplingParams(max_tokens=3, ignore_eos=True))]
    simulated = engine(token_budget=2, max_batch_size=2, trace=True, assumptions={"dtype": "float32"})
    (output,) = replay(simulated, requests)
    chunks = [(2, 0, 0), (2, 2, 0), (1, 4, 1)]  # a budget of two tokens: 5 = 2 + 2 + 1
    times = [
        step_cost(SMALL, ROUND, [(new, stored)], "float32", sampled=drawn).time
        for new, stored, drawn in [*chunks, (1, 5, 1), (1, 6, 1)]
    ]
    line = output.metrics
    assert line.arrival == line.scheduled == 1000.0
    assert line.ttft == pytest.approx(sum(times[:3])) and line.itl == pytest.approx(times[3:])
    assert [record.end - record.start for record in simulated.trace] == pytest.approx(times)
    assert output.outputs[0].token_ids == [0, 0, 0] and output.outputs[0].finish_reason == "length"


workloads = st.tuples(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([0.001, 0.05, 5.0]))


@settings(max_examples=40)
@given(
    workloads,
    st.sampled_from([1, 3, 16]),
    st.integers(1, 6),
    st.sampled_from(["continuous", "static"]),
    st.sampled_from(["on_demand", "max_context"]),
    st.booleans(),
)
def test_any_run_gives_every_request_its_tokens(workload, block_size, batch, batching, reserve, chunked):
    """E12, E15's kin: exactly the tokens asked for, in time, however short the memory; and every block comes back."""
    seed, count, rate = workload
    requests = make_workload(count, uniform(1, 30), uniform(1, 30), 10, poisson(rate), seed=seed)
    blocks = -(-64 // block_size) + seed % 5  # enough for one context and little more
    simulated = engine(
        block_size=block_size, num_blocks=blocks, max_batch_size=batch, token_budget=batch + seed % 9,
        batching=batching, reserve=reserve, chunked_prefill=chunked, trace=True,
    )  # fmt: skip
    outputs = replay(simulated, requests)
    for asked, output in zip(requests, outputs, strict=True):
        assert output.prompt_ids == list(asked.prompt_ids)
        assert output.outputs[0].token_ids == [0] * asked.params.max_tokens
        line = output.metrics
        assert asked.arrival <= line.scheduled < line.token_times[0] and line.token_times[-1] <= line.end
        assert line.token_times == sorted(set(line.token_times))
    simulated.scheduler.check()
    assert simulated.scheduler.num_free == blocks
    summary = summarize(outputs, ttft=math.inf, tpot=math.inf)
    assert summary.output_tokens == sum(r.params.max_tokens for r in requests) and summary.attainment == 1
    # Steps do not overlap, and the busy time is at least what reading the weights once a step takes.
    for one, other in zip(simulated.trace, simulated.trace[1:], strict=False):
        assert one.start < one.end <= other.start


def test_a_request_that_cannot_fit_is_refused_alone():
    """E3: the others get their tokens, and the refusal says why."""
    short, long = SamplingParams(max_tokens=4, ignore_eos=True), SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [TimedRequest(0, [1, 2], short), TimedRequest(0, [1] * 20, long), TimedRequest(0, [3], short)]
    first, refused, last = replay(engine(num_blocks=2), requests)
    assert first.outputs[0].token_ids == last.outputs[0].token_ids == [0] * 4
    assert refused.outputs == () and "blocks" in refused.reason
    assert summarize([first, refused, last]).served == 2


def test_the_clock():
    runner = SimulatedRunner(SMALL, ROUND)
    assert runner.now() == 0
    runner.wait_until(2.5)
    runner.wait_until(1.0)  # a moment that has passed
    assert runner.now() == 2.5
    for moment in (math.inf, math.nan):
        with pytest.raises(ValueError, match="a moment is a finite number of seconds"):
            runner.wait_until(moment)


def test_blocks_by_hand():
    """36 GB less 25.68 GB of weights is 10.32 GB: 787 blocks of 16 * 800 KiB."""
    assert num_blocks(OPT, A100) == (36_000_000_000 - 25_681_029_120) // (16 * 819_200) == 787
    assert num_blocks(OPT, A100, 1, utilization=1.0, reserve_bytes=2e9) == (38_000_000_000 - 25_681_029_120) // 819_200
    assert num_blocks(OPT, A100, 16, "int8") == (36_000_000_000 - WEIGHTS) // (16 * 819_200)
    assert num_blocks(OPT, A100, 16, "bfloat16", "int8") == (36_000_000_000 - 25_681_029_120) // (8 * 819_200)
    assert SimulatedRunner(OPT, A100).num_blocks == 787
    assert SimulatedRunner(OPT, A100, EngineConfig(block_size=32)).num_blocks == 393
    assert SimulatedRunner(OPT, A100, EngineConfig(num_blocks=5)).num_blocks == 5
    exact = Device("exact", 1.0, {"bfloat16": 1.0}, SMALL.weight_bytes() + SMALL.kv_bytes_per_token() * 16, "test")
    assert num_blocks(SMALL, exact, utilization=1.0) == 1
    with pytest.raises(ValueError, match="not one block of 0.00 MB fits exact"):
        num_blocks(SMALL, exact, utilization=1.0, reserve_bytes=1)


def test_the_published_capacity():
    """Kwon et al., table 1: 12 GB (GiB) beside OPT-13B's weights hold 15.7K tokens of 800 KiB."""
    beside = Device("rest", 1.0, {"bfloat16": 1.0}, OPT.weight_bytes() + 12 * 2**30, "table 1")
    assert num_blocks(OPT, beside, 1, utilization=1.0) == 15_728
    assert OPT.weight_bytes() / 1e9 == pytest.approx(26, rel=0.02)


def test_several_as_one():
    pair = several(A100, 2, efficiency=0.75)
    assert (pair.name, pair.memory, pair.bandwidth) == ("2 x A100-40GB", 80e9, 1.5 * 1555e9)
    assert pair.peak("bfloat16") == 1.5 * 312e12 and pair.source == A100.source
    decode = step((1, 512, 1))
    one, two = (SimulatedRunner(OPT, several(A100, n), overhead=0.0).cost(decode).time for n in (1, 2))
    assert one == pytest.approx(2 * two)
    assert num_blocks(published_model("GPT-3 175B"), several(Device.datasheet("A100-80GB"), 8)) > 0


def test_padded_batches_by_hand():
    """Two batches of lengths (3, 2), (5, 1) and (1, 4): to the batch's longest, then to the longest of all."""
    lengths = [(3, 2), (5, 1), (1, 4)]

    def one(batch, prompt, output):
        decodes = [step_cost(SMALL, ROUND, [(1, prompt + made)] * batch, "float32").time for made in range(output - 1)]
        return step_cost(SMALL, ROUND, [(prompt, 0)] * batch, "float32").time + sum(decodes)

    own = padded_batch_times(SMALL, ROUND, lengths, 2, dtype="float32")
    assert own == pytest.approx([one(2, 5, 2), one(1, 1, 4)])
    whole = padded_batch_times(SMALL, ROUND, lengths, 2, "all", dtype="float32")
    assert whole == pytest.approx([one(2, 5, 4), one(1, 5, 4)])
    slow = padded_batch_times(SMALL, ROUND, lengths, 2, dtype="float32", overhead=1.0, bandwidth_efficiency=0.5)
    assert slow == pytest.approx([2 * own[0] + 2, 2 * own[1] + 4])  # 2 and 4 steps, all memory-bound


def test_equal_lengths_leave_nothing_to_pad():
    """Two ways to one number: the engine's static batches of whole prompts, and the closed formula."""
    requests = make_workload(12, fixed(20), fixed(9), 10)
    simulated = engine(num_blocks=64, max_batch_size=4, token_budget=84, batching="static", chunked_prefill=False)
    makespan = summarize(replay(simulated, requests)).makespan
    assert makespan == pytest.approx(sum(padded_batch_times(SMALL, ROUND, [(20, 9)] * 12, 4)))
    assert makespan == pytest.approx(sum(padded_batch_times(SMALL, ROUND, [(20, 9)] * 12, 4, "all")))


def test_the_anyscale_baseline_by_hand():
    """Daniel et al., cap 1,536: four requests padded to 966 outputs, the longest that 1,000 requests have on average.

    A prompt step of 4 * 512 tokens, then 965 decodes that see 513 to 1,477 tokens each: 18.1 s. The 4 * 640 tokens
    counted are then 141 a second with every step at its roofline; at the published 81, a step takes 33 ms.
    """
    (seconds,) = padded_batch_times(OPT, A100, [(512, 966)] * 4, 4)
    prompt = 4 * (2 * 512 * PRODUCTS + 2 * TABLE + 4 * 40 * 5120 * (512 * 513 // 2)) / 312e12
    decodes = (965 * 2 * (WEIGHTS + 4 * 5120) + 4 * 819_200 * (513 + 1477) * 965 // 2) / 1555e9
    assert seconds == pytest.approx(prompt + decodes, rel=1e-12) and seconds == pytest.approx(18.13, abs=0.01)


# Key and value bytes per token in 16 bits, as published: 2 * layers * key/value heads * head size * 2 bytes.
KIB = {
    "OPT-13B": 800, "GPT-3 175B": 4608, "Mistral-7B": 128, "Yi-34B": 240, "Falcon-180B": 160, "Llama-2 70B": 320,
    "PaLM 540B": 118, "T5-XXL": 384, "Chinchilla-70B": 2560,
}  # fmt: skip


def test_published_cache_bytes():
    assert {name: config.kv_bytes_per_token() / 1024 for name, config in PUBLISHED.items()} == KIB


REAL = {
    "OPT-13B": OPTConfig(
        vocab_size=50272, hidden_size=5120, word_embed_proj_dim=5120, num_hidden_layers=40, ffn_dim=20480,
        num_attention_heads=40, max_position_embeddings=2048,
    ),
    "GPT-3 175B": GPT2Config(vocab_size=50257, n_positions=2048, n_embd=12288, n_layer=96, n_head=96),
    "Mistral-7B": MistralConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "Yi-34B": LlamaConfig(
        vocab_size=64000, hidden_size=7168, intermediate_size=20480, num_hidden_layers=60, num_attention_heads=56,
        num_key_value_heads=8,
    ),
    "Falcon-180B": FalconConfig(
        vocab_size=65024, hidden_size=14848, num_hidden_layers=80, num_attention_heads=232, num_kv_heads=8,
        new_decoder_architecture=True, bias=False,
    ),
    "Llama-2 70B": LlamaConfig(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
}  # fmt: skip


def on_paper(config, kind=AutoModelForCausalLM):
    """Names and shapes of the weights of a real architecture, with no memory behind them."""
    with torch.device("meta"):
        return dict(kind.from_config(config).named_parameters())


@pytest.mark.parametrize("name", REAL)
def test_weights_and_operations_of_the_real_architecture(name):
    """`transformers` builds the published shape: its weights, and the matrices that each token is multiplied with."""
    weights, ours = on_paper(REAL[name]), PUBLISHED[name]
    assert ours.num_parameters() == pytest.approx(sum(w.numel() for w in weights.values()), rel=0.003)
    matrices = {n: w for n, w in weights.items() if w.ndim == 2 and "embed" not in n and ".wpe" not in n}
    products = sum(w.numel() for n, w in matrices.items() if "wte" not in n and "lm_head" not in n)
    products += ours.vocab_size * ours.dim  # the head, which may be the input embedding once more
    assert ours.flops_per_token() == pytest.approx(2 * products, rel=0.003)
    if isinstance(REAL[name], (LlamaConfig, MistralConfig)):
        assert ours.num_parameters() == sum(w.numel() for w in weights.values())


def test_a_half_of_t5_xxl_is_what_a_step_reads():
    """An encoder layer with the keys and values for the decoder has the weights of a decoder layer without those."""
    config = T5Config(
        vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_decoder_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    weights = {n: w.numel() for n, w in on_paper(config, AutoModelForSeq2SeqLM).items()}
    handed = sum(n for name, n in weights.items() if "EncDecAttention.k" in name or "EncDecAttention.v" in name)
    halves = {
        half: sum(n for name, n in weights.items() if name.startswith(half) and "block" in name)
        for half in ("encoder", "decoder")
    }
    ours = PUBLISHED["T5-XXL"]
    inside = ours.num_parameters() - 2 * 32_128 * 4096
    assert halves["decoder"] - handed == pytest.approx(inside, rel=0.001)
    assert halves["encoder"] + handed == pytest.approx(inside, rel=0.001)
    assert (halves["encoder"] + handed) * 2 / 1e9 == pytest.approx(10.9, abs=0.05)  # what the docstring sets aside
    assert 2 * inside + 2 * 32_128 * 4096 == pytest.approx(11.1e9, rel=0.005)


def test_totals_without_a_public_checkpoint():
    """PaLM's and Chinchilla's weights are known by their totals."""
    assert PUBLISHED["PaLM 540B"].num_parameters() == pytest.approx(540e9, rel=0.003)
    assert PUBLISHED["Chinchilla-70B"].num_parameters() == pytest.approx(70e9, rel=0.003)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: SimulatedRunner(OPT, A100, overhead=-1), "overhead must be 0 or more seconds per step.*got -1"),
        (lambda: SimulatedRunner(OPT, A100, overhead=math.nan), "overhead must be 0 or more seconds"),
        (lambda: SimulatedRunner(OPT, "A100-80GB"), "device must be a Device, such as .* got 'A100-80GB'"),
        (lambda: SimulatedRunner(OPT, A100, bandwidth_efficiency=0), "bandwidth_efficiency must be above 0.*got 0"),
        (
            lambda: SimulatedRunner(OPT, A100, compute_efficiency=1.01),
            "compute_efficiency must be .*at most 1, got 1.01",
        ),
        (lambda: SimulatedRunner(OPT, A100, dtype="float32"), "no arithmetic peak of A100-40GB for 'float32'"),
        (lambda: SimulatedRunner(OPT, A100, dtype="fp8"), "unknown dtype 'fp8'"),
        (lambda: SimulatedRunner(OPT, A100, kv_dtype="fp8"), "unknown dtype 'fp8'"),
        (lambda: SimulatedRunner(PUBLISHED["GPT-3 175B"], A100), "leaves -313.1 GB; use more devices or fewer bits"),
        (lambda: num_blocks(OPT, A100, 0), "block_size must be an integer of at least 1, got 0"),
        (lambda: num_blocks(OPT, A100, utilization=1.5), "utilization must be above 0 and at most 1, got 1.5"),
        (lambda: num_blocks(OPT, A100, reserve_bytes=-1), "reserve_bytes must be 0 or more, got -1"),
        (lambda: num_blocks(OPT, replace(A100, memory=math.inf)), "the memory of A100-40GB is not known"),
        (lambda: several(A100, 0), "count must be an integer of at least 1, got 0"),
        (lambda: several(A100, 2, 0), "efficiency must be above 0 and at most 1, got 0"),
        (lambda: padded_batch_times(OPT, A100, [], 4), "lengths must hold at least one request"),
        (lambda: padded_batch_times(OPT, A100, [(1, 0)], 4), r"pairs of positive integers, got \(1, 0\)"),
        (lambda: padded_batch_times(OPT, A100, [(1, 1)], 0), "batch_size must be an integer of at least 1"),
        (lambda: padded_batch_times(OPT, A100, [(1, 1)], 1, "longest"), "pad_to must be .* got 'longest'"),
        (lambda: published_model("GPT-5"), "no published shape called 'GPT-5'; there are OPT-13B, "),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_benchmark_runs_on_tiny(monkeypatch, capsys):
    """One setting: both runners get the same steps, the predictions are the cost model's, and the ratio is printed."""
    laptop = Device.datasheet("laptop")
    monkeypatch.setattr(benchmark.Device, "measure", lambda *_: laptop)
    monkeypatch.setattr(benchmark, "usable_cores", lambda: 1)
    arguments = ["--model", "tiny", "--decode", "2", "--prompt", "7", "--steps", "3", "--device", "cpu"]
    decode, prompt = benchmark.main(arguments)
    printed = capsys.readouterr().out
    tiny = ModelConfig.preset("tiny")
    # Four decode steps at contexts 128 to 131, of which the first warms up: the median is at 130.
    assert decode.predicted == pytest.approx(step_cost(tiny, laptop, [(1, 130)] * 2, "float32").time)
    assert prompt.predicted == pytest.approx(step_cost(tiny, laptop, [(7, 0)], "float32").time)
    for result, label in ((decode, "decode of 2 at 128"), (prompt, "prompt of 7")):
        assert len(result.measured.seconds) == 3 and min(result.measured.seconds) > 0
        assert result.ratio == result.predicted / result.measured.median
        assert f"tiny, {label}" in printed
    with pytest.raises(SystemExit):
        benchmark.main(["--steps", "0"])
    assert "--steps must be 1 or more, got 0" in capsys.readouterr().err
    with pytest.raises(ValueError, match="tiny holds 512 tokens: too few for 510 decode steps"):
        next(benchmark.run("tiny", [1], 8, 510, "cpu"))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["Mistral-7B", "OPT-13B"]),  # an untied and a tied output head
    dtype=st.sampled_from(["bfloat16", "int8", "int4"]),
    asked=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 5000), st.booleans()), min_size=1, max_size=40),
)
def test_the_sums_of_a_crowd_cost_what_its_list_costs(name, dtype, asked):
    config = published_model(name)
    device = replace(Device.datasheet("A100-80GB"), overhead=1e-3, layer_overhead=2e-5)
    sampled = sum(draws for *_, draws in asked)
    cost = step_cost(config, device, [request[:2] for request in asked], dtype, sampled=sampled)
    reading, computing, overhead = crowd_times(config, device, dtype)(
        sum(new for new, *_ in asked),
        sum(stored for _, stored, _ in asked),
        sum(new * stored + new * (new + 1) // 2 for new, stored, _ in asked),
        sampled,
    )
    assert reading == pytest.approx(cost.memory_time, rel=1e-9)
    assert computing == pytest.approx(cost.compute_time, rel=1e-9)
    assert overhead == cost.overhead
