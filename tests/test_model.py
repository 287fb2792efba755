"""The model's parts against formulas in float64; whole models are held to `transformers` in test_weights."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from minillm.config import ModelConfig
from minillm.model import RMSNorm, RotaryEmbedding, Transformer, rotate
from minillm.naive import NoCache

CONFIG = ModelConfig(
    vocab_size=61, dim=24, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=10, ffn_dim=40, max_context=48, qk_norm=True
)


def normalized(x, norm):
    """x / sqrt(mean(x^2) + eps) * weight, written out in float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=2),
    dim=st.integers(1, 70),
    size=st.sampled_from([1e-12, 1e-3, 1.0, 1e4, 1e12]),
    eps=st.sampled_from([1e-6, 1e-5, 0.3]),
    seed=st.integers(0, 2**31),
)
def test_the_norm_without_and_with_gradients(shape, dim, size, eps, seed):
    """Values so small that only eps counts, and so large that it does not; both ways to compute it, float32."""
    torch.manual_seed(seed)
    norm, x = RMSNorm(dim, eps), torch.randn(*shape, dim) * size
    torch.nn.init.normal_(norm.weight)
    expected = normalized(x, norm).float()
    before = x.clone()
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-6 * min(size, 1))
    with torch.no_grad():
        torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-6 * min(size, 1))
    assert torch.equal(x, before), "the input was changed"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_the_norm_in_other_dtypes(dtype):
    """16-bit values are normalized in float32: squares of 400 would overflow float16. Rows of zeros stay zeros."""
    torch.manual_seed(1)
    norm, x = RMSNorm(40, 1e-5).to(dtype), (torch.randn(7, 40) * 400).to(dtype)
    norm.weight.normal_()
    x[3] = 0
    out = norm(x)
    assert out.dtype == dtype and not out[3].any()
    rtol = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), normalized(x, norm), rtol=rtol, atol=rtol)


@torch.no_grad()
def test_the_norm_of_a_slice():
    """Heads cut out of a wider product, as for qk_norm: memory with gaps, and none of the rest is touched."""
    torch.manual_seed(2)
    norm, whole = RMSNorm(10, 1e-5), torch.randn(5, 8, 10)
    before = whole.clone()
    torch.testing.assert_close(norm(whole[:, :6]), normalized(whole[:, :6], norm).float())
    torch.testing.assert_close(norm(whole[:, 6:]), normalized(whole[:, 6:], norm).float())
    assert torch.equal(whole, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rotation_is_a_product_of_complex_numbers(dtype):
    """Pair (a, b) is the number a + ib, its turn exp(i angle); one rounding for 16-bit values, and x stays."""
    torch.manual_seed(3)
    rope, positions = RotaryEmbedding(10, 48, 10_000.0), torch.tensor([0, 1, 7, 47])
    x = torch.randn(4, 5, 10).to(dtype)[:, :3]  # a slice: memory with gaps
    before = x.clone()
    angles = positions[:, None] / 10_000.0 ** (torch.arange(0, 10, 2).double() / 10)
    turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    out = rotate(x, *rope(positions))
    assert out.dtype == dtype and torch.equal(x, before)
    tolerance = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(out.double(), torch.cat((turned.real, turned.imag), -1), rtol=tolerance, atol=tolerance)


def test_gradients_of_norm_and_rotation():
    """Against finite differences in float64, and the model's own in float32 against its float64 twin's."""
    torch.manual_seed(4)
    cos, sin = (part.double() for part in RotaryEmbedding(6, 9, 100.0)(torch.tensor([2, 8])))
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))
    assert torch.autograd.gradcheck(RMSNorm(6, 1e-5).double(), (x,))
    model = Transformer(CONFIG).initialize(4)
    twin = copy.deepcopy(model).double()
    tokens, positions = torch.randint(61, (9,)), torch.arange(9)
    for each in (model, twin):
        F.cross_entropy(each.logits(each(tokens, positions, NoCache())), tokens.roll(-1)).backward()
    for (name, parameter), exact in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad.double(), exact.grad, rtol=1e-3, atol=1e-6)


def test_the_same_with_and_without_gradients():
    """Decoding takes another way through the norms than training; in float32 both agree with float64."""
    torch.manual_seed(5)
    model = Transformer(CONFIG).initialize(5)
    tokens, positions = torch.randint(61, (11,)), torch.arange(11)
    exact = copy.deepcopy(model).double()(tokens, positions, NoCache()).detach()
    torch.testing.assert_close(model(tokens, positions, NoCache()).double().detach(), exact, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens, positions, NoCache()).double(), exact, rtol=1e-4, atol=1e-5)
