"""Conversion to fewer key/value heads, held to transformers and to the identity that defines it; uptraining."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm import gqa, kv_cache, naive
from minillm.checkpoints import train
from minillm.config import ModelConfig
from minillm.lab.notebooks import ROOT
from minillm.model import Transformer
from minillm.naive import NoCache
from minillm.sampling import SamplingParams
from minillm.weights import load_model, save_model

CONFIG = ModelConfig(
    vocab_size=61, dim=24, n_layers=2, n_heads=12, n_kv_heads=12, head_dim=6, ffn_dim=28, max_context=32
)


def random_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """Float64, with heads that all differ, norms and biases too."""
    model = Transformer(config).initialize(seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.eval().requires_grad_(False)


def logits(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(tokens, torch.arange(len(tokens)), NoCache()))


def some_tokens(config: ModelConfig, length: int = 11, seed: int = 5) -> torch.Tensor:
    return torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


def heads_of(model: Transformer, layer: int, which: str, part: str = "weight") -> torch.Tensor:
    """Rows of the queries, keys or values of a layer, [heads, head_dim, ...]."""
    c = model.config
    parts = getattr(model.layers[layer].attention.qkv, part).split([c.q_dim, c.kv_dim, c.kv_dim])
    return dict(zip("qkv", parts, strict=True))[which].unflatten(0, (-1, c.head_dim))


@pytest.mark.parametrize("heads", [6, 4, 3, 2, 1])
@pytest.mark.parametrize("variant", [{}, {"qkv_bias": True, "tie_embeddings": False}, {"qk_norm": True}])
def test_each_new_head_is_the_mean_of_its_neighbours_and_nothing_else_changes(heads, variant):
    """E15: the old heads differ, so tiled groups, or a wrong head, would show."""
    model = random_model(replace(CONFIG, **variant))
    converted = gqa.convert(model, heads)
    assert converted.config == replace(model.config, n_kv_heads=heads)
    assert not converted.training and not any(p.requires_grad for p in converted.parameters())
    group = 12 // heads
    for layer in range(2):
        for part in ("weight", "bias") if model.config.qkv_bias else ("weight",):
            assert torch.equal(heads_of(converted, layer, "q", part), heads_of(model, layer, "q", part))
            for which in "kv":
                old, new = heads_of(model, layer, which, part), heads_of(converted, layer, which, part)
                for head in range(heads):
                    expected = sum(old[head * group + i] for i in range(group)) / group
                    torch.testing.assert_close(new[head], expected)
    others = [name for name, _ in model.named_parameters() if ".qkv." not in name]
    old, new = dict(model.named_parameters()), dict(converted.named_parameters())
    assert len(others) > 10 and all(torch.equal(old[name], new[name]) for name in others)


@given(
    groups=st.integers(1, 4), size=st.integers(1, 4), sharing=st.integers(1, 3), head_dim=st.sampled_from([2, 6]),
    bias=st.booleans(), norm=st.booleans(), seed=st.integers(0, 2**30),
)  # fmt: skip
def test_a_model_whose_heads_agree_within_each_group_is_not_changed(groups, size, sharing, head_dim, bias, norm, seed):
    """The identity behind the idea (E15): repeat each head of a grouped model, pool it again, and the logits are the
    same; heads differ between groups. From multi-head models (sharing 1) and from grouped ones."""
    config = ModelConfig(13, 8, 2, groups * size * sharing, groups * size, head_dim, 8, 16, qkv_bias=bias, qk_norm=norm)
    model = random_model(config, seed)
    with torch.no_grad():
        for layer in range(2):
            for part in ("weight", "bias") if bias else ("weight",):
                for which in "kv":
                    heads = heads_of(model, layer, which, part)
                    heads.copy_(heads[::size].repeat_interleave(size, 0))
    tokens = some_tokens(config, 7, seed)
    torch.testing.assert_close(logits(gqa.convert(model, groups), tokens), logits(model, tokens))


def test_tiling_instead_of_repeating_would_change_the_model():
    """E15: the test above can fail. Heads laid out in turn, 0 1 0 1, are not those that a group shares."""
    model = random_model(replace(CONFIG, n_kv_heads=4))
    with torch.no_grad():
        for which in "kv":
            heads = heads_of(model, 0, which)
            heads.copy_(heads[:2].repeat(2, 1, 1))
    tokens = some_tokens(CONFIG)
    assert (logits(gqa.convert(model, 2), tokens) - logits(model, tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("variant", [{}, {"qkv_bias": True}, {"qk_norm": True}])
def test_transformers_runs_the_converted_weights_with_the_same_logits(heads, variant, tmp_path):
    """E15: Hugging Face's Llama, Qwen2 and Qwen3 repeat the heads by their own code; distinct heads.

    Their norms and rotary angles are in float32, which is what the tolerance is for.
    """
    transformers = pytest.importorskip("transformers")
    converted = gqa.convert(random_model(replace(CONFIG, n_kv_heads=4, **variant)), heads)
    save_model(converted, tmp_path, "float64")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert theirs.config.num_key_value_heads == heads
    tokens = some_tokens(CONFIG, 20)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(logits(converted, tokens), expected, rtol=1e-4, atol=1e-4)
    if heads > 1:
        other = gqa.convert(converted, 1)
        assert (logits(other, tokens) - expected).abs().max() > 0.1, "the tolerance tells models apart"


def test_a_converted_model_generates_from_a_cache_of_the_new_size():
    model = gqa.convert(random_model(CONFIG), 2)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    prompt = some_tokens(CONFIG, 5).tolist()
    assert kv_cache.generate(model, prompt, params) == naive.generate(model, prompt, params)
    cache = kv_cache.ContiguousCache(model.config, capacity=10, dtype=torch.float64)
    assert cache.num_bytes == 10 * CONFIG.kv_bytes_per_token("float64") / 6


def test_pooling_in_two_steps_is_pooling_in_one():
    model = random_model(CONFIG)
    twice, once = gqa.convert(gqa.convert(model, 6), 2), gqa.convert(model, 2)
    tokens = some_tokens(CONFIG)
    torch.testing.assert_close(logits(twice, tokens), logits(once, tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_copy_has_weights_of_its_own_in_the_same_dtype(dtype):
    """Also with the same number of heads, where it is a plain copy; tied embeddings stay tied."""
    model = random_model(CONFIG).to(dtype)
    for heads in (12, 3):
        copy = gqa.convert(model, heads)
        assert copy.dtype == dtype and copy.rope.table.dtype == torch.float32
        assert copy.head.weight is copy.embedding.weight
        with torch.no_grad():
            for parameter in copy.parameters():
                parameter.zero_()
    assert all(parameter.abs().max() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("heads", [0, -1, 2.0, True, "2", None])
def test_a_number_of_heads_that_is_none_is_refused(heads):
    with pytest.raises(ValueError, match=f"n_kv_heads must be a positive integer, got {heads!r}"):
        gqa.convert(random_model(CONFIG), heads)


@pytest.mark.parametrize("heads", [5, 8, 24])
def test_groups_of_unlike_size_are_refused_and_the_possible_ones_named(heads):
    with pytest.raises(
        ValueError, match=f"12 key/value heads cannot form {heads} equal groups; use one of 1, 2, 3, 4, 6, 12"
    ):
        gqa.convert(random_model(CONFIG), heads)


# Uptraining.


@pytest.fixture
def language():
    """Ids of a language in which every token but one tells the next."""
    tokens, successor = [0], torch.randperm(61, generator=torch.Generator().manual_seed(2)).tolist()
    generator = torch.Generator().manual_seed(3)
    for _ in range(3000):
        jump = torch.rand((), generator=generator) < 0.1
        tokens.append(int(torch.randint(61, (), generator=generator)) if jump else successor[tokens[-1]])
    return torch.tensor(tokens)


def trained(model, ids, steps=40, **options):
    return gqa.uptrain(model, ids, steps, **{"learning_rate": 1e-2, "batch": 2, "context": 16} | options)


def test_uptraining_lowers_the_loss_of_a_converted_model_and_leaves_it_alone(language):
    model = gqa.convert(Transformer(CONFIG).initialize(1), 3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    seen = []
    result = trained(model, language[:2500], watch=lambda step, learner, loss: seen.append((step, loss)))
    assert [step for step, _ in seen] == list(range(1, 41)) and all(map(math.isfinite, dict(seen).values()))
    old, new = (train.cross_entropy(m, language[2500:], 16) for m in (model, result))
    assert new < old - 0.5
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert result.config == model.config
    assert not result.training and not any(p.requires_grad for p in result.parameters())


def test_what_is_watched_is_what_is_returned_and_drops_nothing_afterwards(language):
    """The values dropped in training come from hooks; the model that is handed back has none."""
    held_out, tokens = [], some_tokens(CONFIG, 16)

    def watch(step, learner, loss):
        held_out.append(train.cross_entropy(learner, language[2500:], 16))

    result = trained(gqa.convert(Transformer(CONFIG).initialize(1), 2), language[:2500], 6, dropout=0.5, watch=watch)
    assert held_out[-1] == pytest.approx(train.cross_entropy(result, language[2500:], 16), rel=1e-5)
    assert not any(module._forward_hooks for module in result.modules())
    with torch.enable_grad():
        again = [result.logits(result(tokens, torch.arange(16), NoCache())) for _ in range(2)]
    assert torch.equal(*again)


def test_uptraining_is_the_same_for_the_same_seed_and_keeps_the_callers_random_numbers(language):
    model = gqa.convert(Transformer(CONFIG).initialize(1), 4)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one, same, other = (trained(model, language, 4, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(torch.rand(3), expected)
    differences = [
        max(float((a - b).abs().max()) for a, b in zip(one.parameters(), m.parameters(), strict=True))
        for m in (same, other)
    ]
    assert differences[0] == 0 < differences[1]


def test_the_learning_rate_warms_up_and_ends_near_zero(language, monkeypatch):
    """A tenth of the steps to the peak; the first step is not lost, the last is the smallest."""
    rates, make = [], train.make_optimizer

    def spy(model, recipe):
        optimizer = make(model, recipe)
        step = optimizer.step
        optimizer.step = lambda: (rates.append(optimizer.param_groups[0]["lr"]), step())
        return optimizer

    monkeypatch.setattr(train, "make_optimizer", spy)
    trained(gqa.convert(Transformer(CONFIG).initialize(1), 4), language, 30, learning_rate=1e-3)
    assert rates[:3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3]) and max(rates) == pytest.approx(1e-3)
    assert rates[3:] == sorted(rates[3:], reverse=True) and 0 < rates[-1] < 1e-5


def test_one_step_on_the_shortest_text_that_will_do():
    model = gqa.convert(Transformer(CONFIG).initialize(1), 1)
    assert trained(model, some_tokens(CONFIG, 18), 1, batch=1).config.n_kv_heads == 1
    with pytest.raises(ValueError, match=r"at least 18 token ids .* shape \[17\]"):
        trained(model, some_tokens(CONFIG, 17), 1, batch=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"batch": 1.5}, "batch must be an integer of at least 1, got 1.5"),
        ({"context": 0}, "context must be an integer of at least 1, got 0"),
        ({"context": 33}, "context 33 is more than the model's context of 32"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive number, got 0.0"),
        ({"learning_rate": math.nan}, "learning_rate must be a positive number, got nan"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"ids": torch.rand(100)}, r"ids must be one run .* got a float32 tensor of shape \[100\]"),
        ({"ids": torch.ones(10, 10, dtype=torch.long)}, r"ids must be one run .* shape \[10, 10\]"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    settings = {"ids": some_tokens(CONFIG, 100), "steps": 2} | options
    with pytest.raises(ValueError, match=message):
        trained(gqa.convert(Transformer(CONFIG).initialize(1), 4), **settings)


def test_weights_in_16_bits_are_refused():
    with pytest.raises(ValueError, match="weights in bfloat16 cannot be trained"):
        trained(gqa.convert(Transformer(CONFIG).initialize(1), 4).bfloat16(), some_tokens(CONFIG, 100), 1)


def test_fewer_heads_hurt_a_trained_model_more(monkeypatch):
    """On `tiny`: pooled into 2 and 1 heads without uptraining, it says less of held-out text, in this order."""
    tiny = load_model("tiny", "cpu", "float32")
    text = (train.HERE / "validation.txt").read_text(encoding="utf-8")[:9000]
    from minillm.tokenizer import load_tokenizer

    ids = torch.tensor(load_tokenizer("tiny").encode(text))[: 3 * 512 + 1]
    losses = [train.cross_entropy(gqa.convert(tiny, heads), ids, 512) for heads in (4, 2, 1)]
    assert losses == sorted(losses) and losses[1] > losses[0] + 0.1


# The chapter.


def test_numbers_in_the_chapter_are_what_the_formulas_give():
    """B4: a constant typed twice drifts."""
    cells = json.loads((ROOT / "book" / "04_grouped_query_attention.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    article, smollm2 = ModelConfig.preset("post-0.5b"), ModelConfig.preset("smollm2")
    c, vocabulary = train.RECIPES["tiny-mha"], ModelConfig.preset("tiny-mha").vocab_size
    words = {4: "four", 5: "five", 6: "six"}
    ratios = [article.n_heads // n for n in (article.n_kv_heads, 1)]
    for phrase in (
        f"{article.n_layers} layers, {article.n_heads} query heads of size {article.head_dim}",
        f"{article.with_kv_heads(4).n_kv_heads} and 1 key/value heads",
        rf"\ln {vocabulary} = {math.log(vocabulary):.1f}",
        f"approaches the ratio of heads, {ratios[0]} and {ratios[1]} here",
        f"SmolLM2-135M {smollm2.n_heads} on {smollm2.n_kv_heads}",
        f"by 0.1 and a sample takes {1.51 / 0.28:.1f} times less time; with one head, by {47.2 - 46.6:.1f} and "
        f"{1.51 / 0.24:.1f} times",
        f"costs {words[round((47.1 - 46.6) / (47.2 - 47.1))]} times as much",
        f"fell from 47 to 3.9 ms, {47 / 3.9:.0f} times faster",
        f"A step read {14 + 1} GB and now reads {14 + 1 / 4}: {(15 / 14.25 - 1) * 100:.0f}% faster",
        f"judge them on the first {5 * ModelConfig.preset('tiny-mha').max_context:,} tokens of the other",
        f"one head in place of 64 makes the cache on each of 8 chips {64 // 8} times smaller",
        f"head 3 reads head 3 // 4 = {3 // 4}. Dealt out in turn it would read 3 mod 2 = {3 % 2}",
    ):
        assert phrase in text, phrase
    tiny = train.RECIPES["tiny"]
    assert c.steps * 2 == tiny.steps and "for half as many steps" in text
    assert replace(c, steps=tiny.steps) == tiny, "the same recipe otherwise"


def test_what_the_chapter_says_of_its_few_steps_of_uptraining_is_so():
    """B4: the start of the test text is harder than its average, and the few steps help one head, not eight."""
    from minillm.tokenizer import load_tokenizer

    recorded = json.loads((ROOT / "book" / "measurements" / "grouped_heads.json").read_text(encoding="utf-8"))
    whole = recorded["values"]["gqa_test_loss_8_heads_step_0"]["value"]
    eight, encode = load_model("tiny-mha", "cpu", "float32"), load_tokenizer("tiny").encode
    texts = {name: (train.HERE / f"{name}.txt").read_text(encoding="utf-8") for name in ("validation", "test")}
    validation, start = (
        torch.tensor(encode(texts[name][: 8 * n * 512])[: n * 512 + 1]) for name, n in (("validation", 8), ("test", 5))
    )
    changes = []
    for model in (eight, gqa.convert(eight, 1)):
        before = train.cross_entropy(model, start, 512)
        learned = gqa.uptrain(model, validation, 8, learning_rate=3e-4, batch=2, context=256, dropout=0.0)
        changes.append(train.cross_entropy(learned, start, 512) - before)
        if model is eight:
            assert before > whole + 0.1
    assert changes[1] < -0.03 and changes[0] > -0.01
