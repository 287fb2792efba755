"""Arithmetic of shapes: the figures of the source article, published models, and tensors counted one by one."""

import pytest
import torch

from minillm.config import ModelConfig
from minillm.linear import Linear
from minillm.model import RotaryEmbedding, Transformer, rotate

POST = ModelConfig.preset("post-0.5b")


def test_article_figures_come_out_exactly():
    """489.3M parameters, 0.98 GB, 24 KiB, 50 MB, 0.25 GB in 4 bits, as the article prints them."""
    assert round(POST.num_parameters() / 1e6, 1) == 489.3
    assert round(POST.weight_bytes("bfloat16") / 1e9, 2) == 0.98
    assert POST.kv_bytes_per_token("bfloat16") == 24 * 1024
    assert round(2048 * POST.kv_bytes_per_token() / 1e6) == 50
    assert round(POST.weight_bytes("int4") / 1e9, 2) == 0.25


@pytest.mark.parametrize(("kv_heads", "per_token", "at_32k"), [(20, 120, 4.03), (4, 24, 0.81), (1, 6, 0.20)])
def test_article_chart(kv_heads, per_token, at_32k):
    """KiB a token and GB at 32,768 tokens for 20, 4 and 1 key/value heads."""
    config = POST.with_kv_heads(kv_heads)
    assert config.kv_bytes_per_token() == per_token * 1024
    assert round(32_768 * config.kv_bytes_per_token() / 1e9, 2) == at_32k


def test_article_chart_points():
    """The values that the article's chart shows at each length, in GB."""
    lengths = (2048, 4096, 8192, 16_384, 24_576, 32_768)
    chart = {
        20: (0.25, 0.50, 1.01, 2.01, 3.02, 4.03),
        4: (0.05, 0.10, 0.20, 0.40, 0.60, 0.81),
        1: (0.01, 0.03, 0.05, 0.10, 0.15, 0.20),
    }
    for kv_heads, points in chart.items():
        per_token = POST.with_kv_heads(kv_heads).kv_bytes_per_token()
        assert tuple(round(n * per_token / 1e9, 2) for n in lengths) == points


def test_published_model():
    """SmolLM2-135M: 134.5M parameters, 23,040 bytes of keys and values a token (its published shape)."""
    config = ModelConfig.preset("smollm2")
    assert round(config.num_parameters() / 1e6, 1) == 134.5
    assert config.kv_bytes_per_token("bfloat16") == 23_040


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("extras", [{}, {"qkv_bias": True}, {"qk_norm": True}])
def test_parameters_are_those_of_the_model(tied, extras):
    """The count agrees with the tensors of a real model, head size apart from dim / heads."""
    config = ModelConfig(
        vocab_size=77, dim=24, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=10, ffn_dim=37, max_context=16,
        tie_embeddings=tied, **extras,
    )  # fmt: skip
    parameters = list(Transformer(config).parameters())
    assert config.num_parameters() == sum(p.numel() for p in parameters)
    assert config.weight_bytes("float32") == sum(p.nbytes for p in parameters)


def test_dtypes_by_name_or_object():
    """A torch dtype and its name mean the same; unknown ones are named."""
    assert POST.weight_bytes(torch.float16) == POST.weight_bytes("float16") == 2 * POST.num_parameters()
    with pytest.raises(ValueError, match="unknown dtype 'int7'"):
        POST.weight_bytes("int7")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 3}, r"n_heads \(20\) must be a multiple of n_kv_heads \(3\)"),
        ({"dim": 0}, "dim must be a positive integer, got 0"),
        ({"n_layers": 2.5}, "n_layers must be a positive integer, got 2.5"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, got True"),
        ({"rope_theta": 0.0}, "rope_theta must be a positive number, got 0.0"),
        ({"norm_eps": float("nan")}, "norm_eps must be a positive number, got nan"),
        ({"eos_token_ids": (-5,)}, "eos_token_ids must be a tuple of token ids"),
        ({"max_context": 10**8}, "max_context must be at most 16,777,216, got 100,000,000"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    """Each message names the field and its value."""
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**POST.__dict__, **change})


def test_unknown_preset_lists_the_names():
    """The message says what there is."""
    with pytest.raises(ValueError, match="post-0.5b"):
        ModelConfig.preset("post-1b")


def test_rotation_keeps_float32_angles_for_16_bit_activations():
    """E21: far out in the context, a bfloat16 query is turned by the float32 angle, rounded once at the end."""
    torch.manual_seed(0)
    rope = RotaryEmbedding(64, 9000, 10_000.0).to(torch.bfloat16)
    x = torch.randn(3, 2, 64).bfloat16()
    cos, sin = rope(torch.tensor([1, 5000, 8999]))
    exact = rotate(x.double(), cos.double(), sin.double())
    torch.testing.assert_close(rotate(x, cos, sin).double(), exact, rtol=2**-8, atol=1e-3)
    rounded = rotate(x.double(), cos.bfloat16().double(), sin.bfloat16().double())
    assert (rounded - exact).abs().max() > 4e-3, "the tolerance would not notice rounded angles"
    angle = torch.tensor(8999.0) / 10_000.0 ** (torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(cos[2, 0, :32], angle.cos(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_two_per_weight_and_attention(tied):
    """Against a real model's products counted one by one; what is left over are its norms."""
    config = ModelConfig(
        vocab_size=77, dim=24, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=10, ffn_dim=37, max_context=16,
        tie_embeddings=tied,
    )  # fmt: skip
    model = Transformer(config)
    products = sum(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert config.flops_per_token() == 2 * (products + norms)
    one_layer = 2 * config.n_heads * config.head_dim  # a score with each key, and its part of the mean of values
    assert config.flops_per_token(7) - config.flops_per_token() == 2 * 7 * one_layer * config.n_layers
    with pytest.raises(ValueError, match="context must be 0 or more, got -1"):
        config.flops_per_token(-1)
