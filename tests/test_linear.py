"""The linear layer: every product it may choose gives x Wᵀ + b, and a packed copy never outlives its weights."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from minillm import linear
from minillm.config import ModelConfig
from minillm.linear import Linear, pack, packed_linear
from minillm.model import Transformer
from minillm.naive import NoCache


@pytest.fixture(scope="module", autouse=True)
def small_layers_are_packed_too():
    """The tests' layers are small; what they show of packing holds for any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "PACKED_FROM", 0)
        yield


packs = pytest.mark.skipif(pack(torch.randn(3, 2)) is None, reason="this PyTorch has no packed product")


def layer(in_features, out_features, bias=False, seed=0):
    """A frozen layer with random weights."""
    generator = torch.Generator().manual_seed(seed)
    made = Linear(in_features, out_features, bias)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return made.requires_grad_(False)


def check(made, x):
    """The layer against a product in float64, to the rounding of a float32 sum of that length."""
    bias = None if made.bias is None else made.bias.double()
    expected = F.linear(x.double(), made.weight.double(), bias)
    out = made(x)
    assert out.dtype == x.dtype and out.shape == expected.shape
    size = F.linear(x.double().abs(), made.weight.double().abs())  # what errors are relative to
    eps = torch.finfo(x.dtype).eps
    assert ((out.double() - expected).abs() <= eps * (4 + size * x.shape[-1] ** 0.5)).all()


@given(
    rows=st.one_of(st.integers(0, 9), st.sampled_from([31, 32, 33, 64, 130])),
    in_features=st.integers(1, 70),
    out_features=st.integers(1, 70),
    bias=st.booleans(),
    packing=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_product_against_float64(rows, in_features, out_features, bias, packing, seed):
    """Odd shapes, no rows, one row, more rows than the packed order is chosen for; with and without packing."""
    torch.manual_seed(seed)
    made = layer(in_features, out_features, bias, seed)
    made.packing = packing
    check(made, torch.randn(rows, in_features))


@pytest.mark.parametrize("packing", [True, False])
def test_inputs_of_any_layout(packing):
    """One and three dimensions, a transposed, a strided and an expanded input."""
    torch.manual_seed(1)
    made = layer(6, 11, bias=True)
    made.packing = packing
    check(made, torch.randn(6))
    check(made, torch.randn(2, 5, 6))
    check(made, torch.randn(6, 7).t())
    check(made, torch.randn(9, 12)[:, ::2])
    check(made, torch.randn(3, 6).expand(4, 3, 6))


@packs
def test_a_packed_copy_is_made_by_two_rows_and_kept():
    """One row needs none; later batches of any size use the one that is there."""
    made = layer(5, 7)
    made(torch.randn(1, 5))
    assert made._packed is None
    made(torch.randn(2, 5))
    packed = made._packed[1]
    assert packed is not None
    check(made, torch.randn(40, 5))
    assert made._packed[1] is packed


@packs
def test_a_small_layer_is_not_packed(monkeypatch):
    """Below the threshold the plain product serves every batch; at it, the packed one."""
    torch.manual_seed(10)
    monkeypatch.setattr(linear, "PACKED_FROM", 36)
    small, large = layer(5, 7), layer(4, 9)
    for made in (small, large):
        check(made, torch.randn(3, made.weight.shape[1]))
    assert small._packed is None and large._packed[1] is not None


def test_memory_runs_along_the_longer_side():
    """More outputs than inputs: by column, which is what one row reads fastest. Values and shape stay."""
    torch.manual_seed(11)
    for in_features, out_features, stride in ((5, 7, (1, 7)), (7, 5, (7, 1)), (6, 6, (6, 1))):
        made = layer(in_features, out_features)
        before = made.weight.clone()
        check(made, torch.randn(1, in_features))
        assert made.weight.stride() == stride and torch.equal(made.weight, before)


def change_in_place(made):
    with torch.no_grad():
        made.weight[1, 2] += 3.0


def change_by_copy(made):
    made.load_state_dict({name: torch.randn_like(value) for name, value in made.state_dict().items()})


def change_by_assignment(made):
    state = {name: torch.randn_like(value) for name, value in made.state_dict().items()}
    made.load_state_dict(state, assign=True)
    made.requires_grad_(False)


def change_parameter(made):
    made.weight = torch.nn.Parameter(torch.randn_like(made.weight), requires_grad=False)


def change_by_rounding(made):
    made.to(torch.bfloat16).to(torch.float32)  # the new float32 weights may lie where the old ones did


def change_shape(made):
    made.weight = torch.nn.Parameter(torch.randn(4, 5), requires_grad=False)


CHANGES = [change_in_place, change_by_copy, change_by_assignment, change_parameter, change_by_rounding, change_shape]


@pytest.mark.parametrize("change", CHANGES)
def test_new_weights_are_used(change):
    """However the weights change, the next product is with the new ones."""
    torch.manual_seed(2)
    made, x = layer(5, 7), torch.randn(3, 5)
    check(made, x)
    change(made)
    check(made, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_take_the_plain_product(dtype):
    """To the last bit, after .to() from a layer that had been packed."""
    torch.manual_seed(3)
    made = layer(6, 5, bias=True)
    made(torch.randn(4, 6))
    made.to(dtype)
    x = torch.randn(4, 6, dtype=dtype)
    assert torch.equal(made(x), F.linear(x, made.weight, made.bias))
    assert made._packed is None or made._packed[1] is None


def test_a_wrong_input_is_an_error():
    """Another dtype or width than the weights' is refused, packed or not."""
    made = layer(6, 5)
    made(torch.randn(4, 6))
    with pytest.raises(RuntimeError):
        made(torch.randn(4, 6).double())
    with pytest.raises(RuntimeError):
        made(torch.randn(4, 7))


def test_gradients_are_those_of_a_plain_product():
    """Weights in training, and inputs in training before frozen weights that had been packed."""
    torch.manual_seed(4)
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 6), (5, 6), (5,)))
    made = Linear(6, 5, bias=True).double()
    made.load_state_dict({"weight": weight, "bias": bias})
    assert torch.autograd.gradcheck(made, (x.requires_grad_(),))
    made = layer(6, 5, bias=True)
    made(torch.randn(4, 6))
    x = torch.randn(4, 6, requires_grad=True)
    made(x).sum().backward()
    torch.testing.assert_close(x.grad, made.weight.sum(0).expand(4, 6))
    made.requires_grad_(True)
    made(x).sum().backward()
    torch.testing.assert_close(made.weight.grad, x.detach().sum(0).expand(5, 6))
    torch.testing.assert_close(made.bias.grad, torch.full((5,), 4.0))


@pytest.mark.parametrize("compiled", [False, True])
def test_training_between_two_evaluations(compiled):
    """A fused optimizer changes weights without giving them a new version; the next product sees it even so."""
    torch.manual_seed(5)
    made, x = layer(6, 5), torch.randn(4, 6)
    check(made, x)
    made.requires_grad_(True)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, fused=True)
    forward = torch.compile(made, backend="eager") if compiled else made
    forward(x).square().sum().backward()
    before = made.weight.detach().clone()
    optimizer.step()
    made.requires_grad_(False)
    assert not torch.equal(before, made.weight)
    check(made, x)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_pack_their_own_weights(duplicate):
    """A packed weight cannot be copied; the copy of a layer goes without, and the original keeps its own."""
    torch.manual_seed(6)
    made, x = layer(5, 7, bias=True), torch.randn(3, 5)
    made(x)
    twin = duplicate(made)
    assert torch.equal(twin(x), made(x))
    twin.weight = torch.nn.Parameter(twin.weight + 1, requires_grad=False)
    check(twin, x)
    check(made, x)


def test_the_state_is_weights_and_bias_alone():
    """Packing leaves the state dict, its keys and its order as they were."""
    torch.manual_seed(7)
    made = layer(5, 7, bias=True)
    made(torch.randn(3, 5))
    assert list(made.state_dict()) == ["weight", "bias"]
    with torch.device("meta"):
        other = Linear(5, 7, bias=True)
    other.load_state_dict(made.state_dict(), assign=True)
    x = torch.randn(3, 5)
    torch.testing.assert_close(other.requires_grad_(False)(x), made(x))


class NoPackedProducts:
    """Stands in for the operators of a PyTorch without oneDNN."""


def test_without_the_packed_product(monkeypatch):
    """macOS, other processors: the plain product, to the last bit."""
    monkeypatch.setattr(torch.ops, "mkldnn", NoPackedProducts())
    torch.manual_seed(8)
    made, x = layer(5, 7, bias=True), torch.randn(3, 5)
    assert pack(made.weight) is None
    assert torch.equal(made(x), F.linear(x, made.weight, made.bias))
    check(made, x)


def test_weights_made_in_inference_mode():
    """They carry no version to watch, so they are never packed."""
    with torch.inference_mode():
        made, x = layer(5, 7), torch.randn(3, 5)
        check(made, x)
        made.weight[0, 0] += 2.0
        check(made, x)


@packs
def test_packed_products_by_hand():
    """`pack` and `packed_linear` alone, as chapter 2 times them; rounds like any float32 product."""
    torch.manual_seed(9)
    weight, bias = torch.randn(13, 9), torch.randn(13)
    packed = pack(weight)
    for rows in (1, 2, 33):
        x = torch.randn(rows, 9)
        expected = F.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(packed_linear(x, packed, bias).double(), expected, rtol=1e-5, atol=1e-5)
    assert pack(torch.randn(3, 2).double()) is None and pack(torch.randn(0, 2)) is None


def test_a_model_with_a_tied_head():
    """The head packs the embedding's weights, and the embedding goes on reading them as they are."""
    config = ModelConfig(61, 24, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=10, ffn_dim=40, max_context=48)
    model = Transformer(config).initialize(3).requires_grad_(False)
    tokens, positions = torch.randint(61, (7,)), torch.arange(7)
    found = model.logits(model(tokens, positions, NoCache()))
    assert model.head.weight is model.embedding.weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear.Linear, "packing", False)
        expected = model.logits(model(tokens, positions, NoCache()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    exact = copy.deepcopy(model).double()
    wide = exact.logits(exact(tokens, positions, NoCache()))
    torch.testing.assert_close(found.double(), wide, rtol=1e-4, atol=1e-5)
