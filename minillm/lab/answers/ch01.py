"""Checks for the exercises of chapter 1: waste, latencies, ragged attention, the nucleus, doubling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F

from minillm.lab.answers import build, work_out
from minillm.lab.checks import Draw, describe, difference

# Conditions of "Ten times too much". The exercise states them in words, and a test compares.
WASTE, LONG_PROMPT = 10, 100
FIXED_MS, TOKEN_MS, SHORT_PROMPT = 30, 0.7, 20
# Conditions of "When is it really n²?".
READ, WRITE = 2000, 50


def passes(prompt: int, new: int) -> int:
    """Token passes of naive generation: prompt + (prompt + 1) + ... over `new` passes."""
    return new * prompt + new * (new - 1) // 2


def waste(short: int, long: int, passes_until_dear: int) -> None:
    """Exercise "Ten times too much": three counts of new tokens."""

    def first(prompt: int) -> int:
        return next(n for n in range(1, 1000) if passes(prompt, n) >= WASTE * (prompt + n - 1))

    work_out(
        "short",
        short,
        first(1),
        {
            first(1) - 1: "at that length it is still below ten times; for p = 1 the ratio is (n + 1) / 2",
            first(1) + 1: "one token earlier it is ten times already; for p = 1 the ratio is (n + 1) / 2",
            WASTE: "that is for a very long prompt, where the ratio comes close to n",
        },
        unit="new tokens",
        tolerance=1e-6,
    )
    work_out(
        "long",
        long,
        first(LONG_PROMPT),
        {
            first(LONG_PROMPT) - 1: "at that length it is still a little below ten times: round up",
            first(1): "that is the answer for a prompt of one token; a long prompt is recomputed whole each time",
            first(LONG_PROMPT) + 1: "one token earlier it is ten times already",
        },
        unit="new tokens",
        tolerance=1e-6,
    )
    dear = next(k for k in range(1, 1000) if TOKEN_MS * (SHORT_PROMPT + k - 1) > FIXED_MS)
    work_out(
        "dear",
        passes_until_dear,
        dear,
        {
            dear - 1: "that pass is still cheaper than the fixed part: pass k holds p + k - 1 tokens, not p + k",
            dear + SHORT_PROMPT - 1: "that is how many tokens the pass holds; the prompt is among them",
            dear + SHORT_PROMPT: "count new tokens; the prompt goes through in every pass as well",
        },
        tolerance=1e-6,
    )


def latencies(answer: Callable) -> None:
    """Exercise "What the user felt": a function of the time of asking and the arrival times, in seconds."""
    build("latencies", answer, right_latencies, latency_cases, LATENCY_MISTAKES)


def right_latencies(asked: float, arrivals: Sequence[float]) -> dict:
    """TTFT and TPOT in seconds (TPOT is None where there is no gap), and every gap."""
    gaps = [after - before for before, after in zip(arrivals, arrivals[1:], strict=False)]
    tpot = (arrivals[-1] - arrivals[0]) / len(gaps) if gaps else None
    return {"ttft": arrivals[0] - asked, "tpot": tpot, "itl": gaps}


def latency_cases(draw: Draw) -> Iterator[tuple]:
    """A clock that does not start at 0; one token, two at the same moment, two, an odd number, more."""
    yield 7.25, [7.75]
    yield 7.25, [7.75, 7.75]
    for count in (2, 3, 7, 12):
        asked = draw.uniform(5, 500)
        arrivals = [asked + draw.uniform(0.3, 0.9)]
        for _ in range(count - 1):
            arrivals.append(arrivals[-1] + draw.choice([0.0, draw.uniform(0.01, 0.2), draw.uniform(0.01, 0.2)]))
        yield asked, arrivals


def altered(change: Callable[[dict, float, Sequence[float]], dict]) -> Callable:
    """`right_latencies` with some of its values replaced."""

    def mistake(asked: float, arrivals: Sequence[float]) -> dict:
        result = right_latencies(asked, arrivals)
        return result | change(result, asked, arrivals)

    return mistake


LATENCY_MISTAKES = {
    "TTFT starts when the request is made, and the clock did not read 0 then: subtract `asked`": altered(
        lambda r, asked, arrivals: {"ttft": arrivals[0]}
    ),
    "with one token there is no gap, and TPOT is None: 0 would read as infinitely fast": altered(
        lambda r, asked, arrivals: {"tpot": 0.0 if r["tpot"] is None else r["tpot"]}
    ),
    "a gap of 0 s is a gap; TPOT is None only where there is none": altered(lambda r, *_: {"tpot": r["tpot"] or None}),
    "n tokens have n - 1 gaps: divide by that": altered(
        lambda r, asked, arrivals: {"tpot": (arrivals[-1] - arrivals[0]) / len(arrivals)}
    ),
    "TPOT leaves out the wait for the first token: start at the first arrival, and count n - 1 gaps": altered(
        lambda r, asked, arrivals: {"tpot": (arrivals[-1] - asked) / len(arrivals)}
    ),
    "TPOT leaves out the wait for the first token: start at the first arrival": altered(
        lambda r, asked, arrivals: {"tpot": (arrivals[-1] - asked) / max(1, len(arrivals) - 1)}
    ),
    "the first gap lies between the first two tokens; the wait before the first is TTFT": altered(
        lambda r, asked, arrivals: {"itl": [r["ttft"], *r["itl"]]}
    ),
    "`itl` holds every gap, not the largest alone": altered(lambda r, *_: {"itl": max(r["itl"], default=0.0)}),
}


def ragged_attention(answer: Callable) -> None:
    """Exercise "Several requests in one run": q [T, n_heads, D], k and v [T, n_kv_heads, D], lengths -> like q."""
    build("ragged_attention", answer, right_attention, attention_cases, ATTENTION_MISTAKES)


def right_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], *, wrong: str = ""
) -> torch.Tensor:
    """Causal attention inside each sequence, by PyTorch's own function; `wrong` names a slip to make."""
    group = q.shape[1] // k.shape[1]
    if wrong == "tiled":
        k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)
    else:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    slips = {"unscaled": 1.0, "not rooted": 1 / q.shape[-1], "heads": q.shape[1] ** -0.5}
    scale = slips.get(wrong, q.shape[-1] ** -0.5)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(len(q))
    seen = at[:, None] >= at[None, :] + {"blind": 1, "peeking": -1}.get(wrong, 0)
    mine = owner[:, None] == owner[None, :]
    seen = {"leaking": seen, "all seen": mine}.get(wrong, seen & mine)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1)
    # A softmax over nothing is not a number; PyTorch's function says 0 instead.
    return out.masked_fill(~seen.any(-1)[:, None, None], float("nan"))


def attention_cases(draw: Draw) -> Iterator[tuple]:
    """One sequence, then several; a head of its own for each query head, one for all, and one for some."""
    shapes = [([1], 2, 2), ([3], 2, 1), ([2, 1], 1, 2), ([1, 4, 2], 2, 3), ([5, 1, 1, 3], 3, 2), ([6, 7], 4, 1)]
    for lengths, kv_heads, group in shapes:
        size, total = draw.choice([3, 5, 7, 10]), sum(lengths)
        q = draw.tensor(total, kv_heads * group, size, dtype=torch.float64)
        k, v = (draw.tensor(total, kv_heads, size, dtype=torch.float64) for _ in range(2))
        yield q, k, v, lengths


def with_slip(slip: str) -> Callable:
    """`right_attention` with one slip."""
    return lambda q, k, v, lengths: right_attention(q, k, v, lengths, wrong=slip)


ATTENTION_MISTAKES = {
    "this is what tiling the heads gives; neighbours share a key/value head: use repeat_interleave": with_slip("tiled"),
    "the scores are not scaled: divide them by the square root of the head size": with_slip("unscaled"),
    "the scores are divided by the head size; divide by its square root": with_slip("not rooted"),
    "the scores are divided by the root of the number of heads, not of the head size": with_slip("heads"),
    "a token sees itself too: this mask hides the diagonal": with_slip("blind"),
    "each token sees one token too many: the mask starts one place late": with_slip("peeking"),
    "the sequences see each other: a token sees only earlier tokens of its own sequence": with_slip("leaking"),
    "no token may see a later one: the causal mask is missing": with_slip("all seen"),
}


def nucleus(answer: Callable) -> None:
    """Exercise "The nucleus": probabilities [vocab_size] and top_p -> the filtered ones, adding up to 1."""
    build("nucleus", answer, right_nucleus, nucleus_cases, NUCLEUS_MISTAKES, compare=same_nucleus)


def right_nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """A token stays if the mass of the more likely ones is below top_p; those that stay add up to 1."""
    ranked, order = probs.sort(descending=True, stable=True)
    return renormalized(probs, order[ranked.cumsum(0) - ranked < top_p])


def renormalized(probs: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """`probs` at the places `kept`, 0 elsewhere, adding up to 1; NaN where nothing is kept."""
    result = torch.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()


def nucleus_cases(draw: Draw) -> Iterator[tuple]:
    """Masses that binary fractions add up to exactly; ties across the edge; a first token above top_p; at random."""

    def shuffled(values: list[float]) -> torch.Tensor:
        return torch.tensor(draw.sample(values, len(values)), dtype=torch.float64)

    yield shuffled([0.375, 0.25, 0.1875, 0.1875]), 0.5
    yield shuffled([0.75, 0.125, 0.0625, 0.0625]), draw.uniform(0.1, 0.7)
    yield shuffled([0.5, 0.25, 0.125, 0.125]), 0.75
    yield shuffled([0.5, 0.125, 0.125, 0.125, 0.125]), 0.7
    for size in (5, 17, 101):
        yield (2 * draw.tensor(size, dtype=torch.float64)).softmax(0), draw.uniform(0.3, 0.95)
    yield torch.full((10,), 0.1, dtype=torch.float64), 1.0  # added up one by one, they stay below 1
    yield draw.tensor(7, dtype=torch.float64).softmax(0), 1.0


def same_nucleus(expected: torch.Tensor, given, probs: torch.Tensor, top_p: float) -> str | None:
    """As `difference`, but of tokens that are equally likely any may stay."""
    wrong = difference(expected, given, 1e-6)
    if wrong is None or not isinstance(given, torch.Tensor) or given.shape != expected.shape:
        return wrong
    if difference(renormalized(probs, given.nonzero()[:, 0]), given, 1e-6) is None:
        if difference(expected.sort().values, given.sort().values, 1e-6) is None:
            return None
        return f"{int((given > 0).sum())} tokens stay where {int((expected > 0).sum())} should"
    return f"{wrong}; expected {describe(expected)}" if len(expected) <= 5 else wrong


def cut(keep: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> Callable:
    """A nucleus with another rule: `keep(ranked, mass up to and including each, top_p)` says which ranks stay."""

    def mistake(probs: torch.Tensor, top_p: float) -> torch.Tensor:
        ranked, order = probs.sort(descending=True, stable=True)
        return renormalized(probs, order[keep(ranked, ranked.cumsum(0), top_p)])

    return mistake


NUCLEUS_MISTAKES = {
    "the token that crosses top_p is dropped; it must stay, or the mass falls short": cut(
        lambda ranked, mass, top_p: mass <= top_p
    ),
    "the token that crosses top_p is dropped when a more likely one is there; it must stay": cut(
        lambda ranked, mass, top_p: (mass <= top_p) | (torch.arange(len(mass)) == 0)
    ),
    "one token too many stays where the mass reaches top_p exactly: stop as soon as it is not below": cut(
        lambda ranked, mass, top_p: mass - ranked <= top_p
    ),
    "the mass before a token decides; this compares each token's own probability with top_p": cut(
        lambda ranked, mass, top_p: ranked >= top_p
    ),
    "what stays must add up to 1 again: divide by its sum": lambda probs, top_p: torch.where(
        right_nucleus(probs, top_p) > 0, probs, 0.0
    ),
    "no sum reaches top_p here, as they are rounded: argmax then says 0, and one token stays": cut(
        lambda ranked, mass, top_p: torch.arange(len(mass)) <= (mass >= top_p).int().argmax()
    ),
    "the values are in order of size; put each back at its own token": lambda *case: (
        right_nucleus(*case).sort(descending=True).values
    ),
    "equal probabilities are kept or dropped together; cut by rank, so that as few as possible stay": (
        lambda probs, top_p: renormalized(
            probs, (probs >= probs[right_nucleus(probs, top_p) > 0].min()).nonzero()[:, 0]
        )
    ),
    "nothing is cut off here: every token stays": lambda probs, top_p: probs,
    "tokens are taken from the least likely end: sort with descending=True": cut(
        lambda ranked, mass, top_p: mass[-1] - mass < top_p
    ),
}


def doubling(new_per_prompt: float, growth: float) -> None:
    """Exercise "When is it really n²?": where doubling the answer trebles the work, and a prediction from it."""
    work_out(
        "new_per_prompt",
        new_per_prompt,
        2,
        {
            0.5: "that is the prompt over the answer; we asked for the answer over the prompt",
            1: "at n = p your table shows a factor nearer to 2.7",
            3: "3 is the factor; in which row of the table does it stand?",
        },
        unit="times the prompt",
        tolerance=0.05,
    )
    work_out(
        "growth",
        growth,
        passes(READ, 2 * WRITE) / passes(READ, WRITE),
        {
            4: "n² would say 4, but this answer is far shorter than its prompt: look at the first rows of the table",
            2: "that leaves out the second term, n(n - 1)/2",
            3: "that is the factor for an answer twice as long as the prompt; this one is far shorter",
            1: "twice as many passes, each over the whole prompt: the work does grow",
            passes(READ, WRITE) / passes(READ, 2 * WRITE): "that is the inverse",
        },
        unit="times the work",
        tolerance=0.0025,  # 2.02 and 2.025 pass, 2.01 and 2.03 do not
    )
