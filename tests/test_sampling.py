"""Sampling against transformers' own warpers, closed formulas and the chi-squared test."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from minillm import sampling
from minillm.sampling import HEAD, SamplingParams, StopCondition, draw, probabilities, sample


def reference(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers draws this row from."""
    scores = TemperatureLogitsWarper(float(params.temperature))(None, row[None].clone())
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores.softmax(-1)[0]


def fresh_logits(rows: int, vocab_size: int, ties: bool = False, dtype=torch.float32) -> torch.Tensor:
    logits = torch.randn(rows, vocab_size, dtype=torch.float64) * 4
    return (logits.round() if ties else logits).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 2, 7, 50, 257, HEAD, HEAD + 1, 3001]),
    temperature=st.sampled_from([0.01, 0.3, 0.7, 1.0, 1.0, 1.7, 50.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 900, 2000, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999]),
    seed=st.integers(0, 2**32),
)
def test_distribution_is_that_of_transformers(vocab_size, temperature, top_k, top_p, seed):
    """Case E17: order and edges, with k beyond the vocabulary and vocabularies on both sides of the short cut.

    The short cut adds up masses in another order, so beyond it we compare in float64, where no edge is that near.
    """
    torch.manual_seed(seed)
    dtype = torch.float64 if vocab_size > HEAD or seed % 2 else torch.float32
    logits = fresh_logits(3, vocab_size, dtype=dtype)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    ours = probabilities(logits, [params] * 3)
    expected = torch.stack([reference(row, params) for row in logits])
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, expected)
    assert torch.equal(ours > 0, expected > 0)


@pytest.mark.parametrize("top_k", [0, 1, 3, 20])
@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("vocab_size", [10, 40, 3000])
def test_ties_are_cut_as_in_transformers(top_k, top_p, vocab_size):
    """Case E17: all scores tied with the k-th stay; of a tie across top_p, as many stay as in transformers.

    Which of them stay is open there (its sort is not stable), so we compare the sorted distributions.
    """
    logits = fresh_logits(4, vocab_size, ties=True)
    logits[0] = 1.5  # nothing but a tie
    params = SamplingParams(top_k=top_k, top_p=top_p)
    ours = probabilities(logits, [params] * 4)
    expected = torch.stack([reference(row, params) for row in logits])
    torch.testing.assert_close(ours.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("ties", [True, False])
def test_the_short_cut_of_top_p_changes_nothing(monkeypatch, ties):
    """Looking at the largest scores first gives what a full sort gives, for narrow and wide nuclei side by side."""
    logits = fresh_logits(6, 2500, ties, dtype=torch.float64)
    logits[1] *= 0.05  # nearly flat: its nucleus reaches beyond HEAD
    logits[4] = 0
    params = [SamplingParams(top_p=top_p, top_k=top_k) for top_p in (0.3, 0.8, 0.95) for top_k in (0, 700)]
    params[1], params[4] = SamplingParams(top_p=0.8), SamplingParams(top_p=0.6)
    short = probabilities(logits, params)
    assert ((short > 0).sum(-1) > HEAD).tolist() == [False, True, False, False, True, False]
    monkeypatch.setattr(sampling, "HEAD", 10_000)
    torch.testing.assert_close(short, probabilities(logits, params))
    assert torch.equal(short > 0, probabilities(logits, params) > 0)


def test_edge_of_top_p():
    """Case E17: the token that crosses the line stays; a line met exactly lets no further token in."""
    logits = torch.full((1, 4), 3.0)
    for top_p, kept in ((1e-9, 1), (0.2499, 1), (0.25, 1), (0.2501, 2), (0.5, 2), (0.75, 3), (0.7501, 4), (1.0, 4)):
        assert (probabilities(logits, [SamplingParams(top_p=top_p)]) > 0).sum() == kept, top_p


def test_top_p_counts_what_top_k_left():
    """Case E17: top-p sees the distribution renormalised after top-k."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    probs = probabilities(logits, [SamplingParams(top_k=2, top_p=0.5)])
    torch.testing.assert_close(probs, torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64))


@pytest.mark.parametrize("top_k", [0, 1, 5])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 1.0])
def test_temperature_zero_is_argmax(top_k, top_p):
    """Case E7."""
    logits = fresh_logits(5, 33)
    params = [SamplingParams(temperature=0, top_k=top_k, top_p=top_p)] * 5
    best = logits.argmax(-1)
    assert torch.equal(sample(logits, params, [None] * 5), best)
    assert torch.equal(probabilities(logits, params), torch.nn.functional.one_hot(best, 33).float())


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_extreme_temperatures_give_no_nan(temperature, size):
    logits = fresh_logits(3, 20) * size
    logits[1, 3] = -math.inf
    for params in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_k=3, top_p=0.9),
    ):
        probs = probabilities(logits, [params] * 3)
        assert torch.equal(probs, torch.nn.functional.one_hot(logits.argmax(-1), 20).float())


def test_huge_temperature_is_uniform():
    probs = probabilities(fresh_logits(2, 9), [SamplingParams(temperature=1e30)] * 2)
    torch.testing.assert_close(probs, torch.full((2, 9), 1 / 9))


def test_16_bit_logits_are_filtered_in_float32():
    logits = fresh_logits(2, 60).bfloat16()
    params = [SamplingParams(temperature=0.7, top_p=0.8)] * 2
    assert torch.equal(probabilities(logits, params), probabilities(logits.float(), params))
    assert probabilities(logits, params).dtype == torch.float32


MIXED = [
    SamplingParams(temperature=0, top_k=3),
    SamplingParams(seed=5),
    SamplingParams(seed=6, temperature=0.5, top_k=4),
    SamplingParams(seed=7, top_p=0.7),
    SamplingParams(seed=8, temperature=2.0, top_k=30, top_p=0.9),
]


@pytest.mark.parametrize("vocab_size", [11, HEAD + 300])
def test_tokens_do_not_depend_on_the_batch(vocab_size):
    """Every request alone draws what it draws in any company; the logits are left as they came."""
    steps = [fresh_logits(len(MIXED), vocab_size) for _ in range(6)]
    alone = []
    for row, params in enumerate(MIXED):
        generator = params.make_generator()
        alone.append([sample(logits[row : row + 1], [params], [generator]).item() for logits in steps])
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [3, 1]):
        generators = [MIXED[row].make_generator() for row in order]
        for step, logits in enumerate(steps):
            before = logits.clone()
            tokens = sample(logits[order], [MIXED[row] for row in order], generators)
            assert torch.equal(logits, before)
            assert tokens.dtype == torch.int64 and tokens.device.type == "cpu"
            assert tokens.tolist() == [alone[row][step] for row in order]


@pytest.mark.parametrize("vocab_size", [50, 40_000])
def test_mixed_batch_has_each_rows_distribution(vocab_size):
    logits = fresh_logits(len(MIXED), vocab_size)
    logits[3] *= 0.1
    together = probabilities(logits, MIXED)
    for row, params in enumerate(MIXED):
        assert torch.equal(together[row], probabilities(logits[row : row + 1], [params])[0])
        if params.temperature:
            expected = reference(logits[row].double(), params)
            torch.testing.assert_close(together[row].double(), expected, rtol=1e-4, atol=1e-6)


def test_draws_follow_the_distribution():
    """Chi-squared over 20,000 draws, 99.99% quantile by the Wilson-Hilferty formula."""
    params = SamplingParams(seed=torch.initial_seed(), temperature=1.3, top_k=9)
    logits = torch.randn(1, 12)
    probs = probabilities(logits, [params])[0].double()
    uniform = torch.rand(20_000, dtype=torch.float64, generator=params.make_generator())
    counts = torch.bincount(draw(probs.expand(20_000, -1), uniform), minlength=12)
    kept = probs > 0
    assert counts[~kept].sum() == 0
    expected = probs[kept] * 20_000
    freedom = int(kept.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert ((counts[kept] - expected) ** 2 / expected).sum() < limit


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-3, 1.0]), min_size=1, max_size=40).filter(any),
    uniform=st.one_of(st.sampled_from([0.0, 5e-324, 1 - 2**-53, 1.0]), st.floats(0, 1, exclude_max=True)),
)
def test_never_a_token_of_probability_zero(weights, uniform):
    """Also at both ends of the cumulative distribution, and past its end, where rounding could lead."""
    probs = torch.tensor([weights], dtype=torch.float64)
    probs /= probs.sum()
    token = draw(probs.float(), torch.tensor([uniform], dtype=torch.float64)).item()
    assert probs.float()[0, token] > 0


def test_draw_is_the_inverse_of_the_cumulative_distribution():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]])
    for uniform, token in ((0.0, 0), (0.2499, 0), (0.25, 2), (0.7499, 2), (0.75, 3), (0.9999, 3)):
        assert draw(probs, torch.tensor([uniform], dtype=torch.float64)).item() == token


def test_samples_of_one_prompt_are_independent():
    """Case E18: neighbouring samples and neighbouring seeds share no stream; the same seed and sample do."""
    logits = torch.zeros(1, 200_000)

    def first(seed, index, count=3):
        params = SamplingParams(seed=seed, n=4)
        generator = params.make_generator(index)
        return tuple(sample(logits, [params], [generator]).item() for _ in range(count))

    runs = [first(seed, index) for seed in (0, 1, 2, 2**32, -1) for index in range(4)]
    assert len({run[0] for run in runs}) == len(runs)
    assert runs[5] == first(1, 1)
    assert first(None, 0) != first(None, 0)


def test_greedy_rows_draw_nothing():
    params = [SamplingParams(temperature=0), SamplingParams(seed=3)]
    generators = [p.make_generator() for p in params]
    before = [g.get_state() for g in generators]
    sample(fresh_logits(2, 8), params, generators)
    assert torch.equal(generators[0].get_state(), before[0])
    assert not torch.equal(generators[1].get_state(), before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_greedy_in_every_dtype_and_layout(dtype):
    """The largest logit, also of rows that lie apart in memory and of logits that carry gradients."""
    torch.manual_seed(12)
    params, logits = [SamplingParams(temperature=0)] * 5, torch.randperm(5 * 41).view(41, 5).to(dtype).t()
    assert sample(logits, params, [None] * 5).tolist() == logits.double().argmax(-1).tolist()
    assert torch.equal(sample(logits.requires_grad_(), params, [None] * 5), logits.double().argmax(-1))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rows_are_named(temperature, bad):
    logits = fresh_logits(3, 6)
    logits[1, :] = bad if bad < 0 else logits[1]
    logits[1, 2] = bad
    params = [SamplingParams(temperature=temperature)] * 3
    with pytest.raises(ValueError, match="row 1"):
        sample(logits, params, [p.make_generator() for p in params])
    with pytest.raises(ValueError, match="row 1"):
        probabilities(logits, params)


def test_masked_tokens_are_allowed():
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    probs = probabilities(logits, [SamplingParams(top_k=2, top_p=0.9)])
    torch.testing.assert_close(probs, torch.tensor([[0.5, 0.0, 0.5]]))


def test_shapes_are_checked_and_an_empty_batch_is_fine():
    params = [SamplingParams()] * 2
    for logits in (torch.zeros(3, 5), torch.zeros(5)):
        with pytest.raises(ValueError, match="vocab_size"):
            probabilities(logits, params)
    with pytest.raises(ValueError, match="generators"):
        sample(torch.zeros(2, 5), params, [None])
    assert sample(torch.zeros(0, 5), [], []).tolist() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", v) for v in (-0.1, math.nan, math.inf, "1", None, True)),
        *(("top_p", v) for v in (0, -0.5, 1.01, math.nan, "1")),
        *(("top_k", v) for v in (-1, 1.5, True)),
        *(("max_tokens", v) for v in (0, -3, 2.0, None)),
        *(("n", v) for v in (0, 1.5)),
        *(("stop", v) for v in ("", ("a", ""), (b"a",), (3,))),
        *(("stop_token_ids", v) for v in ((1.5,), ("a",), (-1,), (True,))),
        *(("seed", v) for v in (1.5, "1", True)),
    ],
)
def test_settings_that_make_no_sense_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_stop_is_one_string_or_several():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]) == SamplingParams(stop=("a", "b"), stop_token_ids=(3,))
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a"))


class Spelling:
    """A tokenizer whose tokens are the pieces it was given; what is unfinished comes at the end."""

    def __init__(self, pieces, unfinished=""):
        self.pieces, self.unfinished = pieces, unfinished

    def detokenizer(self):
        return self

    def add(self, token):
        return self.pieces[token]

    def finish(self):
        return self.unfinished


def run(condition, tokens):
    """The tokens consumed and the reason."""
    for count, token in enumerate(tokens, 1):
        if reason := condition.add(token):
            return count, reason
    return len(tokens), None


def test_length_and_end_tokens():
    """Case E12: exactly max_tokens tokens; the token that ends generation is one of them."""
    assert run(StopCondition(SamplingParams(max_tokens=3), [9]), [1, 2, 3, 4]) == (3, "length")
    assert run(StopCondition(SamplingParams(max_tokens=3), [9]), [1, 9, 3]) == (2, "stop")
    assert run(StopCondition(SamplingParams(max_tokens=2), [9]), [1, 9]) == (2, "stop")
    assert run(StopCondition(SamplingParams(max_tokens=5, ignore_eos=True), [9]), [1, 9, 3]) == (3, None)
    params = SamplingParams(max_tokens=5, ignore_eos=True, stop_token_ids=[7, 9])
    assert run(StopCondition(params, [8]), [1, 8, 9, 3]) == (3, "stop")
    condition = StopCondition(SamplingParams(max_tokens=1))
    condition.add(4)
    assert condition.num_tokens == 1
    with pytest.raises(ValueError, match="after the end"):
        condition.add(5)


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer"):
        StopCondition(SamplingParams(stop="x"))


def test_stop_string_across_tokens():
    pieces = ["ab", "c<", "EN", "D>", "tail"]
    condition = StopCondition(SamplingParams(stop=["<END>", "zz"]), (), Spelling(pieces))
    settled = []
    for token in range(4):
        reason = condition.add(token)
        settled.append(condition.text[: condition.settled])
    assert (reason, condition.text, condition.num_tokens) == ("stop", "abc", 4)
    assert settled == ["ab", "abc", "abc", "abc"]


def test_the_first_stop_string_in_the_text_counts():
    condition = StopCondition(SamplingParams(stop=["world", "lo"]), (), Spelling(["hello world"]))
    assert condition.add(0) == "stop" and condition.text == "hel"


def test_text_held_back_comes_with_the_last_token():
    condition = StopCondition(SamplingParams(max_tokens=2), (), Spelling(["a", "b"], unfinished="\ufffd"))
    assert run(condition, [0, 1]) == (2, "length") and condition.text == "ab\ufffd"
    condition = StopCondition(SamplingParams(max_tokens=1, stop="b!"), (), Spelling(["ab"], unfinished="!"))
    assert run(condition, [0]) == (1, "stop") and condition.text == "a"


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_are_found_as_in_the_whole_text(pieces, stop):
    """The incremental search stops at the same token as a search of everything after each token would."""
    condition = StopCondition(SamplingParams(stop=stop), (), Spelling(pieces))
    text, sent = "", ""
    for token, piece in enumerate(pieces):
        reason = condition.add(token)
        text += piece
        assert condition.text[: condition.settled].startswith(sent)  # what was streamed is never taken back
        sent = condition.text[: condition.settled]
        starts = [text.find(s) for s in stop if s in text]
        assert (reason == "stop") == bool(starts)
        assert condition.text == (text[: min(starts)] if starts else text)
        if reason:
            break


def test_a_greedy_row_draws_nothing_and_takes_the_first_of_equals():
    """E7: at temperature 0, top_p below 1 neither touches the generator nor chooses among ties."""
    logits = torch.tensor([[0.5, 2.0, 2.0, -1.0, 2.0]])
    params = SamplingParams(temperature=0.0, top_p=0.3, top_k=2, seed=3)
    generator = params.make_generator()
    before = generator.get_state()
    assert all(sample(logits, [params], [generator]).item() == logits.argmax().item() for _ in range(5))
    assert torch.equal(generator.get_state(), before)
