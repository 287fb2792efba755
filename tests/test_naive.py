"""Naive generation and its door: what is refused, and what NoCache computes."""

import socket

import pytest
import torch

from minillm import kv_cache, naive
from minillm.config import ModelConfig
from minillm.model import Transformer
from minillm.naive import NoCache, check_prompt
from minillm.sampling import SamplingParams
from minillm.tokenizer import load_tokenizer
from minillm.weights import load_model

CONFIG = ModelConfig(
    vocab_size=53, dim=20, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, ffn_dim=33, max_context=24,
    eos_token_ids=(7,),
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG).initialize(1).double().requires_grad_(False)


def test_a_flat_run_of_several_sequences_equals_each_alone(model):
    """E16: unlike lengths and equal lengths, no padding, no token sees another sequence."""
    torch.manual_seed(0)
    for lengths in ([3, 1, 7], [4, 4, 4], [1], [5, 0, 2]):
        runs = [torch.randint(53, (n,)) for n in lengths]
        positions = torch.cat([torch.arange(n) for n in lengths])
        out = model(torch.cat(runs), positions, NoCache(lengths)).split(lengths)
        for run, got in zip(runs, out, strict=True):
            if len(run):
                alone = model(run, torch.arange(len(run)), NoCache())
                torch.testing.assert_close(got, alone, rtol=1e-10, atol=1e-10)


def test_lengths_must_add_up(model):
    """A wrong layout is named, not computed."""
    with pytest.raises(ValueError, match=r"lengths \[2, 2\] add up to 4, but the run has 5 tokens"):
        model(torch.tensor([1, 2, 3, 4, 5]), torch.arange(5), NoCache([2, 2]))


@pytest.mark.parametrize("generate", [naive.generate, kv_cache.generate])
@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        (None, {}, "prompt_ids must be a list of token ids, got NoneType"),
        (torch.tensor([1, 2]), {}, "prompt_ids must be a list of token ids, got Tensor"),
        ([1], {"n": 2, "max_tokens": 2}, "n=2: these functions make one sample"),
        ([3, 53], {}, r"prompt_ids\[1\] is 53, outside the vocabulary of 0 to 52"),
        ([-1], {}, r"prompt_ids\[0\] is -1, outside"),
        ([2.0], {}, r"prompt_ids\[0\] is 2.0: token ids are integers"),
        ([True], {}, r"prompt_ids\[0\] is True"),
        ([1] * 20, {"max_tokens": 5}, "20 prompt tokens .* context of 24: shorten the prompt or ask for at most 4"),
        ([1] * 30, {"max_tokens": 1}, "context of 24: shorten the prompt$"),
        ([1], {"stop": "end", "max_tokens": 3}, "tokenizer"),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_work(model, monkeypatch, generate, prompt, params, message):
    """Each message names the value and what would be accepted; the model is never called."""
    monkeypatch.setattr(Transformer, "forward", lambda *a: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, SamplingParams(**params))


def test_a_prompt_that_just_fits_is_served(model):
    """Prompt plus max_tokens may equal the context."""
    check_prompt([1] * 20, SamplingParams(max_tokens=4), CONFIG)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    assert len(naive.generate(model, [1] * 20, params)) == len(kv_cache.generate(model, [1] * 20, params)) == 4


@pytest.mark.parametrize("generate", [naive.generate, kv_cache.generate])
def test_logits_that_are_not_numbers_are_an_error(model, monkeypatch, generate):
    """A model that overflows says so; it does not emit token 0."""
    monkeypatch.setattr(Transformer, "logits", lambda self, hidden: torch.full((1, 53), float("nan")))
    with pytest.raises(ValueError, match="NaN|nan"):
        generate(model, [1, 2], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("generate", [naive.generate, kv_cache.generate])
def test_generation_ends_at_stop_tokens(model, generate):
    """The model's own end of text unless it is ignored, and the request's; the token itself is returned."""
    free = generate(model, [5, 6], SamplingParams(max_tokens=12, temperature=1.5, seed=3, ignore_eos=True))
    chosen = free[4]
    cut = free[: free.index(chosen) + 1]
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=3, ignore_eos=True, stop_token_ids=[chosen])
    assert generate(model, [5, 6], params) == cut


def test_the_end_of_text_token_ends_generation(model, monkeypatch):
    """eos_token_ids of the config, unless ignore_eos."""
    logits = torch.full((1, 53), -5.0)
    logits[0, 7] = 5
    monkeypatch.setattr(Transformer, "logits", lambda self, hidden: logits)
    assert naive.generate(model, [1], SamplingParams(max_tokens=5, temperature=0)) == [7]
    assert naive.generate(model, [1], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)) == [7] * 5


def test_nothing_remote_is_needed(monkeypatch):
    """B14: after the install a shipped model loads and writes with every connection refused."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("something wants the network"))
    model, tokenizer = load_model("tiny", "cpu"), load_tokenizer("tiny")
    tokens = kv_cache.generate(model, tokenizer.encode("It was a"), SamplingParams(max_tokens=8, temperature=0))
    assert len(tokens) == 8 and tokenizer.decode(tokens).strip()
