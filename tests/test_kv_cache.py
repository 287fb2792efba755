"""The contiguous cache: what it stores, what it refuses, and that it equals computing everything again."""

import random

import pytest
import torch

from minillm import kv_cache
from minillm.config import ModelConfig
from minillm.kv_cache import ContiguousCache, chunk_attention
from minillm.model import Transformer
from minillm.naive import NoCache
from minillm.sampling import SamplingParams

CONFIG = ModelConfig(
    vocab_size=61, dim=24, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=10, ffn_dim=40, max_context=48,
    tie_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG).initialize(5).double().requires_grad_(False)


def whole(model, tokens):
    """Hidden states of one sequence, computed at once."""
    return model(torch.tensor(tokens), torch.arange(len(tokens)), NoCache())


def poisoned(num_sequences=1, capacity=None):
    """A cache whose unwritten slots are not numbers, so that reading one shows."""
    cache = ContiguousCache(CONFIG, num_sequences, capacity, dtype=torch.float64)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


@pytest.mark.parametrize("cut", [1, 2, 7, 30])
def test_any_chunks_give_the_one_shot_hidden_states(model, cut):
    """E5 in small: unwritten slots are poisoned, and every chunk size gives the same result."""
    tokens = random.Random(cut).choices(range(CONFIG.vocab_size), k=31)
    cache, parts = poisoned(), []
    for start in range(0, len(tokens), cut):
        part = tokens[start : start + cut]
        parts.append(model(torch.tensor(part), cache.positions([len(part)]), cache))
    torch.testing.assert_close(torch.cat(parts), whole(model, tokens), rtol=1e-9, atol=1e-9)
    assert cache.lengths == [31]


def test_a_ragged_batch_equals_its_members_alone(model):
    """E16: sequences of unlike lengths, some absent from a step, none padded; no NaN anywhere."""
    rng = random.Random(2)
    sequences = [rng.choices(range(CONFIG.vocab_size), k=n) for n in (1, 9, 17, 4)]
    cache, hidden = poisoned(4, 20), [[] for _ in sequences]
    taken = [0] * 4
    while taken != [len(s) for s in sequences]:
        counts = [rng.randrange(min(5, len(s) - t) + 1) for s, t in zip(sequences, taken, strict=True)]
        if not any(counts):
            continue
        tokens = [x for s, t, c in zip(sequences, taken, counts, strict=True) for x in s[t : t + c]]
        out = model(torch.tensor(tokens), cache.positions(counts), cache.view(counts)).split(counts)
        for s, part in enumerate(out):
            hidden[s].append(part)
            taken[s] += counts[s]
    for sequence, parts in zip(sequences, hidden, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole(model, sequence), rtol=1e-9, atol=1e-9)


def test_equal_lengths_decode_in_one_product(model):
    """The batched decode path, with grouped heads that are all different, equals the sequences alone (E15)."""
    rng = random.Random(3)
    sequences = [rng.choices(range(CONFIG.vocab_size), k=8) for _ in range(5)]
    cache = poisoned(5, 8)
    prompts = [x for s in sequences for x in s[:6]]
    model(torch.tensor(prompts), cache.positions([6] * 5), cache.view([6] * 5))
    for step in (6, 7):
        tokens = torch.tensor([s[step] for s in sequences])
        out = model(tokens, cache.positions([1] * 5), cache.view([1] * 5))
        expected = torch.stack([whole(model, s[: step + 1])[-1] for s in sequences])
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_chunk_attention_against_written_out_softmax():
    """Each row by hand, in float64; key/value heads all different (E15)."""
    torch.manual_seed(0)
    shapes = ((6, 2, 3, 8), (4, 4, 1, 5), (6, 2, 1, 9), (5, 1, 1, 4), (6, 3, 1, 1), (5, 1, 7, 7), (3, 3, 2, 2))
    for heads, kv_heads, new, seen in shapes:
        # As a model hands it over, [new, heads, 4]: turned, it is not contiguous.
        q = torch.randn(new, heads, 4, dtype=torch.float64).transpose(0, 1)[None]
        k, v = (torch.randn(1, kv_heads, seen, 4, dtype=torch.float64) for _ in range(2))
        out = chunk_attention(q, k, v)
        assert out.shape == q.shape
        for head in range(heads):
            shared = head // (heads // kv_heads)  # neighbours share a key/value head
            for t in range(new):
                until = seen - new + t + 1
                weights = (k[0, shared, :until] @ q[0, head, t] / 4**0.5).softmax(0)
                torch.testing.assert_close(out[0, head, t], weights @ v[0, shared, :until])


def test_first_decoded_token_stands_at_the_prompt_length(model, monkeypatch):
    """E6: positions of the steps are 0..n-1, then n, n+1, ..."""
    seen = []
    forward = Transformer.forward

    def spy(self, tokens, positions, cache):
        seen.append(positions.tolist())
        return forward(self, tokens, positions, cache)

    monkeypatch.setattr(Transformer, "forward", spy)
    kv_cache.generate(model, [7, 8, 9, 10], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert seen == [[0, 1, 2, 3], [4], [5]]


def test_truncate_forgets_the_tail(model):
    """After truncate, other tokens may follow, as if the forgotten ones had never been."""
    rng = random.Random(4)
    first, second = (rng.choices(range(CONFIG.vocab_size), k=12) for _ in range(2))
    cache = poisoned()
    model(torch.tensor(first), cache.positions([12]), cache)
    cache.truncate(0, 5)
    out = model(torch.tensor(second), cache.positions([12]), cache)
    torch.testing.assert_close(out, whole(model, first[:5] + second)[5:], rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="17 tokens to 18"):
        cache.truncate(0, 18)
    with pytest.raises(ValueError, match="no sequence -1"):
        cache.truncate(-1, 0)


def test_a_failed_pass_leaves_the_lengths(model):
    """Lengths grow only when the last layer has stored its part."""
    cache = poisoned()
    view = cache.view([2])
    q, k = torch.randn(2, 6, 10).double(), torch.randn(2, 2, 10).double()
    view.attend(0, q, k, k)
    assert cache.lengths == [0]


def test_a_cache_of_one_sequence_after_a_failed_pass(model):
    """Handed over as it is, it begins anew at the first layer, wherever the last pass stopped."""
    tokens = [5, 6, 7, 8]
    cache = poisoned()
    model(torch.tensor(tokens[:3]), cache.positions([3]), cache)
    q, k = torch.randn(1, 6, 10).double(), torch.randn(1, 2, 10).double()
    cache.attend(0, q, k, k)
    cache.truncate(0, 2)
    out = model(torch.tensor(tokens[2:]), cache.positions([2]), cache)
    torch.testing.assert_close(out, whole(model, tokens)[2:], rtol=1e-9, atol=1e-9)
    assert cache.lengths == [4]


def test_positions_go_on_where_sequences_end():
    """Integers in the order of the run, also for a sequence that gets none, and for an empty step."""
    cache = ContiguousCache(CONFIG, 3)
    cache.lengths = [4, 0, 9]
    assert cache.positions([2, 3, 0]).tolist() == [4, 5, 0, 1, 2]
    assert cache.positions([0, 0, 0]).dtype == torch.long


def test_a_spent_view_is_refused(model):
    """A view serves one pass; used again, it would overwrite what the pass has stored."""
    cache = poisoned()
    view = cache.view([2])
    model(torch.tensor([1, 2]), torch.tensor([0, 1]), view)
    with pytest.raises(ValueError, match=r"began at lengths \[0\], the cache is at \[2\]"):
        model(torch.tensor([3, 4]), torch.tensor([2, 3]), view)


def test_what_does_not_fit_is_refused():
    """Each message names the value and the limit."""
    cache = ContiguousCache(CONFIG, 2, 4)
    with pytest.raises(ValueError, match="sequence 1 holds 0 tokens and cannot take 5 more: its capacity is 4"):
        cache.view([1, 5])
    with pytest.raises(ValueError, match="1 counts for a cache of 2"):
        cache.view([1])
    with pytest.raises(ValueError, match="pass cache.view"):
        cache.attend(0, torch.randn(1, 6, 10), torch.randn(1, 2, 10), torch.randn(1, 2, 10))
    with pytest.raises(ValueError, match="add up to 3, but the run has 2"):
        cache.view([1, 2]).attend(0, torch.randn(2, 6, 10), torch.randn(2, 2, 10), torch.randn(2, 2, 10))
    with pytest.raises(ValueError, match="at least 1"):
        ContiguousCache(CONFIG, 0)


def test_bytes_agree_with_the_formula():
    """Chapter 3's formula: what the cache reserves is kv_bytes_per_token times capacity."""
    cache = ContiguousCache(CONFIG, 3, 7, dtype=torch.bfloat16)
    assert cache.num_bytes == 3 * 7 * CONFIG.kv_bytes_per_token("bfloat16")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ContiguousCache(CONFIG, 1, 49), "capacity 49 is more than the model's context of 48"),
        (lambda: ContiguousCache(CONFIG, 1.5), "num_sequences must be an integer of at least 1, got 1.5"),
        (lambda: ContiguousCache(CONFIG, 1, 4).view([1.5]), "cannot take 1.5 more"),
        (lambda: ContiguousCache(CONFIG, 1, 4).truncate(0, 0.5), "to 0.5"),
        (lambda: ContiguousCache(CONFIG).attend(0, torch.ones(1, 6, 10), *[torch.ones(1, 1, 10)] * 2), r"\[1, 2, 10\]"),
    ],
)  # fmt: skip
def test_sizes_that_would_be_misread_are_refused(make, message):
    """A head too few would be broadcast, a fraction stored: each is an error that names the value."""
    with pytest.raises(ValueError, match=message):
        make()
