"""One table of paths, all held to `naive.generate`, token for token.

A path is a function (model, prompts, params) -> new tokens of each prompt. To hold a new path to the
reference, write it and add it to PATHS. Products of different batch shapes round differently, so the
table runs in float64, where no near-tie can flip a token; in float32 a difference is accepted only
where the reference itself was nearly undecided.
"""

import functools
import random
from dataclasses import replace

import one_process
import pytest
import torch

from minillm import kv_cache, naive
from minillm.config import EngineConfig, ModelConfig
from minillm.engine import Engine
from minillm.kv_cache import ContiguousCache
from minillm.model import Transformer
from minillm.naive import NoCache
from minillm.runner import ModelRunner
from minillm.sampling import SamplingParams, StopCondition, sample

NEAR_TIE = 1e-3  # in float32, logits this close may change places


def contiguous(model, prompts, params):
    """Each prompt alone, with a cache."""
    return [kv_cache.generate(model, prompt, params) for prompt in prompts]


@torch.inference_mode()
def ragged_batch(model, prompts, params, chunk=None):
    """All prompts in one cache of several sequences, their prompts in chunks of at most `chunk` tokens."""
    cache = ContiguousCache(model.config, len(prompts), None, model.device, model.dtype)
    generators = [params.make_generator() for _ in prompts]
    stops = [StopCondition(params, model.config.eos_token_ids) for _ in prompts]
    waiting, outputs, done = [list(p) for p in prompts], [[] for _ in prompts], [False] * len(prompts)
    while not all(done):
        counts = [0 if d else min(len(w), chunk or len(w)) for w, d in zip(waiting, done, strict=True)]
        tokens = [token for w, c in zip(waiting, counts, strict=True) for token in w[:c]]
        hidden = model(torch.tensor(tokens), cache.positions(counts), cache.view(counts)).split(counts)
        for s, count in enumerate(counts):
            waiting[s] = waiting[s][count:]
            if waiting[s] or done[s]:
                continue
            token = sample(model.logits(hidden[s][-1:]), [params], [generators[s]]).item()
            outputs[s].append(token)
            waiting[s], done[s] = [token], stops[s].add(token) is not None
    return outputs


def ragged_chunks(model, prompts, params):
    """The ragged batch with prompts in chunks of three tokens."""
    return ragged_batch(model, prompts, params, chunk=3)


def served(**settings):
    """All prompts through one engine; its books balance after every step, and no key is read before it is written (E5).

    num_blocks="smallest" is the pool that just holds the longest of them alone.
    """

    def path(model, prompts, params):
        wanted = {"num_blocks": 64, "block_size": 16} | settings
        if wanted["num_blocks"] == "smallest":
            wanted["num_blocks"] = smallest_pool(prompts, params, wanted["block_size"])
        if wanted.get("reserve") == "max_context":
            wanted["num_blocks"] = 2 * -(-model.config.max_context // wanted["block_size"])
        outputs, stats = serve(model, EngineConfig(**wanted), prompts, params)
        PREEMPTIONS.append(stats["preemptions"])
        return [output.outputs[0].token_ids for output in outputs]

    return path


def serve(model, config, prompts, params) -> tuple[list, dict]:
    """Outputs in order, and what the engine counted. Its cache starts full of NaN."""
    runner = ModelRunner(model, config)
    runner.cache.k.fill_(torch.nan)
    runner.cache.v.fill_(torch.nan)
    engine, done = Engine(runner, config), {}
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
    assert engine.scheduler.num_free == config.num_blocks
    CACHED.append(sum(sample.timeline.cached_tokens for output in done.values() for sample in output.outputs))
    return [done[id] for id in ids], engine.stats


def forked(model, prompts, params):
    """Three samples of each prompt share its blocks; the first of them is the one that naive generation gives."""
    config = EngineConfig(block_size=3, num_blocks=60, max_batch_size=7, token_budget=11)
    outputs, _ = serve(model, config, prompts, replace(params, n=3))
    for output in outputs:
        if params.temperature == 0:
            assert len({tuple(sample.token_ids) for sample in output.outputs}) == 1
    return [output.outputs[0].token_ids for output in outputs]


def disaggregated(**settings):
    """Prompts computed by one engine, their keys and values sent, and decoded by another; both caches of equal size."""

    def path(model, prompts, params):
        wanted = {"num_blocks": 64, "prefix_caching": False} | settings
        if wanted["num_blocks"] == "smallest":
            wanted["num_blocks"] = smallest_pool(prompts, params, wanted["block_size"])
        config = EngineConfig(**wanted)
        with pytest.MonkeyPatch.context() as patch:
            wire = one_process.Wire(patch)
            one_process.prefill(model, prompts, params, config)
            outputs = one_process.decode(model, prompts, params, config, one_process.arrived(model))
        assert not wire.sent
        return outputs

    return path


def smallest_pool(prompts, params, block_size) -> int:
    """Blocks that just hold the longest of the requests alone."""
    return max(-(-(len(prompt) + params.max_tokens - 1) // block_size) for prompt in prompts)


PREEMPTIONS: list[int] = []
CACHED: list[int] = []
PATHS = {
    "contiguous": contiguous,
    "ragged batch": ragged_batch,
    "ragged chunks": ragged_chunks,
    "paged, one at a time": served(max_batch_size=1, block_size=5),
    "continuous, blocks of 1": served(block_size=1, num_blocks=300),
    "continuous, blocks of 3": served(block_size=3),
    "continuous, blocks of 16": served(block_size=16),
    "continuous, budget of 1": served(block_size=3, token_budget=1),
    "continuous, budget of 5": served(block_size=3, token_budget=5),
    "continuous, whole prompts": served(block_size=3, token_budget=8, max_batch_size=3, chunked_prefill=False),
    "preempted, blocks of 1": served(block_size=1, num_blocks="smallest"),
    "preempted, blocks of 3": served(block_size=3, num_blocks="smallest", token_budget=7),
    "preempted, blocks of 16": served(block_size=16, num_blocks="smallest"),
    "static": served(batching="static", max_batch_size=3, block_size=3),
    "static, preempted": served(batching="static", block_size=2, num_blocks="smallest"),
    "static, reserved": served(batching="static", reserve="max_context", block_size=4),
    "continuous, reserved": served(reserve="max_context", block_size=4),
    "forked": forked,
    "prefixes, blocks of 1": served(block_size=1, num_blocks=300, max_batch_size=2),
    "prefixes, blocks of 3": served(block_size=3, max_batch_size=2),
    "prefixes, always evicting": served(block_size=2, num_blocks="smallest", max_batch_size=2),
    "prefixes, longest first": served(block_size=2, max_batch_size=2, token_budget=5, order="prefix"),
    "no prefixes": served(block_size=3, max_batch_size=2, prefix_caching=False),
    "disaggregated, blocks of 1": disaggregated(block_size=1, num_blocks=300, token_budget=4),
    "disaggregated, blocks of 3": disaggregated(block_size=3, max_batch_size=2),
    "disaggregated, smallest pools": disaggregated(block_size=2, num_blocks="smallest", token_budget=5),
}


def small_config(rng: random.Random) -> ModelConfig:
    """A random small shape: any number of key/value heads, head size apart from dim, biases and norms."""
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    return ModelConfig(
        vocab_size=rng.randrange(50, 120), dim=rng.choice([24, 40, 56]), n_layers=rng.choice([1, 2, 3]),
        n_heads=kv_heads * group, n_kv_heads=kv_heads, head_dim=rng.choice([6, 10, 16]), ffn_dim=rng.choice([31, 64]),
        max_context=64, tie_embeddings=rng.random() < 0.5, qkv_bias=rng.random() < 0.5, qk_norm=rng.random() < 0.5,
    )  # fmt: skip


def random_model(config: ModelConfig, dtype, seed: int) -> Transformer:
    """Random weights, large enough that the next token depends on the whole prefix."""
    model = Transformer(config).initialize(seed).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            else:
                parameter *= 8
    return model


def workload(config: ModelConfig, rng: random.Random) -> list[list[int]]:
    """One to five prompts of 1 to 20 tokens; many are starts of one another, or repeat, or part in the middle."""
    common = [rng.randrange(config.vocab_size) for _ in range(20)]
    prompts = []
    for _ in range(rng.randrange(1, 6)):
        length = rng.randrange(1, 21)
        shared = rng.choice([0, length, rng.randrange(length + 1)])
        prompts.append(common[:shared] + [rng.randrange(config.vocab_size) for _ in range(length - shared)])
    return prompts


@functools.cache
def case(seed: int, temperature: float, dtype: torch.dtype):
    """A random model, prompts, parameters, and what naive generation makes of them; the same for every path."""
    rng = random.Random(f"{seed} {temperature} {dtype}")
    config = small_config(rng)
    model, prompts = random_model(config, dtype, seed), workload(config, rng)
    params = SamplingParams(max_tokens=rng.randrange(1, 24), temperature=temperature, top_k=20, seed=seed)
    return model, prompts, params, [naive.generate(model, prompt, params) for prompt in prompts]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_path_gives_the_tokens_of_naive_generation(name, temperature):
    """float64, random shapes and prompts; sampling with a seed too, whatever else is in the batch."""
    PREEMPTIONS.clear()
    CACHED.clear()
    for seed in range(12):
        model, prompts, params, expected = case(seed, temperature, torch.float64)
        assert PATHS[name](model, prompts, params) == expected, f"seed {seed}, {model.config}"
    assert sum(PREEMPTIONS) or "preempted" not in name, "the pool is not small"
    assert sum(CACHED) or not name.startswith("prefixes"), "nothing is shared"
    assert not sum(CACHED) or name != "no prefixes"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_reference_says_something(temperature):
    """Models that repeat themselves would prove little; and there are several hundred workloads in all."""
    cases = [case(seed, temperature, torch.float64) for seed in range(12)]
    assert sum(len(set(sum(expected, []))) for *_, expected in cases) > 60
    assert 2 * len(cases) * len(PATHS) > 200


@torch.inference_mode()
def margin_at(model, ids) -> float:
    """How far the best next token of `ids` is ahead of the second."""
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), NoCache())
    best, second = model.logits(hidden[-1]).topk(2).values
    return (best - second).item()


@pytest.mark.parametrize("name", PATHS)
def test_path_in_float32_differs_at_near_ties_only(name):
    """Where float32 gives another token, the reference's first choice was hardly ahead of its second."""
    for seed in range(6):
        model, prompts, params, reference = case(seed, 0.0, torch.float32)
        for prompt, expected, got in zip(prompts, reference, PATHS[name](model, prompts, params), strict=True):
            for step, (a, b) in enumerate(zip(expected, got, strict=True)):
                if a != b:
                    assert margin_at(model, prompt + expected[:step]) < NEAR_TIE
                    break


@pytest.mark.parametrize("name", ["naive", *PATHS])
def test_exactly_the_tokens_asked_for(name):
    """E12: the first new token is not dropped: with no stop there are max_tokens of them."""
    config = small_config(random.Random(1))
    model = random_model(config, torch.float64, 1)
    for max_tokens in (1, 2, 7):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        path = PATHS.get(name, lambda m, prompts, p: [naive.generate(m, prompt, p) for prompt in prompts])
        assert [len(tokens) for tokens in path(model, [[3, 1, 4], [1]], params)] == [max_tokens, max_tokens]
