"""Checks for the exercises of chapter 7: a budget for a target, a fair share, what is read again, by experiment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from minillm.lab.answers import build, work_out
from minillm.lab.checks import CheckFailed, Draw, choice, plain

# Conditions of "A budget for a target". The exercise states them in words, and a test compares.
WEIGHTS, BANDWIDTH, PEAK = 8e9, 2e12, 300e12  # weights of 2 bytes, bytes a second, operations a second
RUNNING, STORED, TOKEN_BYTES = 40, 2500, 100_000
TARGET, PROMPT = 0.05, 12_000  # seconds, tokens
# What "By experiment" prints; a test runs its cell and compares.
LARGEST_WITHIN, ENOUGH_OFFLINE = 512, 256


def budget(decode_ms: float, free: float, largest: float, steps: float) -> None:
    """Exercise "A budget for a target": a decode step in ms, free tokens, the largest budget, steps of a prompt."""
    weights, stored = 2 * WEIGHTS, RUNNING * STORED * TOKEN_BYTES
    decode, each = (weights + stored) / BANDWIDTH, 2 * WEIGHTS / PEAK
    work_out(
        "decode_ms",
        decode_ms,
        1000 * decode,
        {
            1000 * weights / BANDWIDTH: "that reads the weights alone; the stored keys and values are read too",
            1000 * stored / BANDWIDTH: "that reads the keys and values alone",
            1000 * (weights + STORED * TOKEN_BYTES) / BANDWIDTH: "each of the running requests has its own tokens",
            500 * (weights + 2 * stored) / BANDWIDTH: "16 bits are two bytes a weight",
            decode: "that is seconds; milliseconds are asked for",
        },
        unit="ms",
    )
    fit = decode / each
    whole_number("free", free)
    work_out(
        "free",
        free,
        math.floor(fit),
        {
            math.ceil(fit): "that step is already longer than a decode step: round down",
            math.floor(2 * fit): "two operations a weight: a multiplication and an addition",
            math.floor(fit) - RUNNING: "the decodes are tokens of the step too, and it is the step that is asked for",
            math.floor(weights / BANDWIDTH / each): "the keys and values take their time to read as well",
        },
        unit="tokens",
        tolerance=1e-6,
    )
    within_target(largest, steps, decode, each)


def within_target(largest: float, steps: float, decode: float, each: float) -> None:
    """The second half of `budget`; reading takes `decode` seconds a step, computing `each` seconds a token."""
    most = TARGET / each
    whole_number("largest", largest)
    work_out(
        "largest",
        largest,
        math.floor(most),
        {
            math.ceil(most): "that step misses the target by a little: round down",
            math.floor(2 * most): "two operations a weight: a multiplication and an addition",
            math.floor((TARGET - decode) / each): "reading and computing overlap: the slower counts, not their sum",
            math.floor(most) - RUNNING: "the budget counts all tokens of the step, those of the decodes included",
        },
        unit="tokens",
        tolerance=1e-6,
    )
    chunks = PROMPT / (math.floor(most) - RUNNING)
    whole_number("steps", steps, "a part of a step is a step: round up")
    work_out(
        "steps",
        steps,
        math.ceil(chunks),
        {
            math.floor(chunks): "the decodes take their tokens from the budget first; and a part of a step is a step",
        },
        unit="steps",
        tolerance=1e-6,
    )


def whole_number(name: str, answer: float, remark: str = "only whole tokens count: round down") -> None:
    """Raises CheckFailed with the remark for a count that is not whole."""
    answer = plain(answer)
    if isinstance(answer, float) and not answer.is_integer():
        raise CheckFailed(f"{name}: {answer:,.6g} is not right; {remark}")


def share(answer: Callable) -> None:
    """Exercise "A fair share": (missing tokens of each job, budget, most) -> tokens that each gets in this step."""
    build("share", answer, right_share, share_cases, SHARE_MISTAKES)


def right_share(missing: Sequence[int], budget: int, most: int, *, wrong: str = "") -> list[int]:
    """Decodes, then every prompt up to `most`, then the rest in order of arrival; `wrong` names a slip to make."""
    if wrong == "in order":
        counts, left = [], budget
        for tokens in missing:
            counts.append(max(0, min(tokens, most if tokens > 1 else 1, left)))
            left -= counts[-1]
    else:
        left = budget - (0 if wrong == "decodes free" else sum(tokens == 1 for tokens in missing))
        counts = [int(tokens == 1) for tokens in missing]
        for place, tokens in enumerate(missing):
            if tokens > 1:
                cap = {"no cap": tokens, "drops long": most if tokens <= most else 0}.get(wrong, most)
                counts[place] = min(tokens, cap, left)
                left -= 0 if wrong == "forgets" else counts[place]
    order = [place for place, tokens in enumerate(missing) if tokens > 1]
    for place in {"reversed": order[::-1], "no second": [], "first only": order[:1]}.get(wrong, order):
        more = min(missing[place] - counts[place], most if wrong == "capped again" else left, left)
        counts[place], left = counts[place] + more, left - more
    return counts


def share_cases(draw: Draw) -> Iterator[tuple]:
    """Decodes alone, one prompt, a decode behind prompts, no room, two long ones, a short one behind; at random."""
    yield [1, 1], 5, 3
    yield [7], 4, 2
    yield [9, 9, 1], 6, 4
    yield [1, 1, 1, 8], 3, 4
    yield [20, 3], 8, 4
    yield [20, 3, 30], 15, 4
    yield [5, 5, 5], 9, 3
    yield [2, 2, 40, 1], 30, 3
    yield [5, 9, 30], 20, 4  # the second round reaches the third prompt
    yield [30, 9, 5], 20, 4  # and here it ends with the first
    for _ in range(30):
        kinds = [draw.choice([1, 1, draw.randrange(2, 9), draw.randrange(10, 90)]) for _ in range(draw.randrange(1, 8))]
        yield kinds, kinds.count(1) + draw.randrange(60), draw.randrange(1, 20)


def share_slip(slip: str) -> Callable:
    """`right_share` with one slip."""
    return lambda *case: right_share(*case, wrong=slip)


SHARE_MISTAKES = {
    "a prompt took the place of a decode behind it: set the decodes' tokens aside before you grant any": share_slip(
        "in order"
    ),
    "the decodes come out of the budget too": share_slip("decodes free"),
    "in the first round a prompt gets at most `most`, or a long one leaves nothing to those behind it": share_slip(
        "no cap"
    ),
    "what the first round leaves of the budget goes round again": share_slip("no second"),
    "the second round has no limit but what is missing and what is left": share_slip("capped again"),
    "in the second round the oldest prompt comes first": share_slip("reversed"),
    "the second round goes on to the next prompt when the first one has all it needs": share_slip("first only"),
    "a prompt longer than `most` gets `most` tokens, not none": share_slip("drops long"),
    "what one prompt takes is gone for the next": share_slip("forgets"),
}


def read_again(answer: Callable) -> None:
    """Exercise "What chunks read again": (prompt, chunk, stored) -> tokens of the cache read beyond one piece."""
    build("read_again", answer, right_read_again, read_cases, READ_MISTAKES)


def right_read_again(prompt: int, chunk: int, stored: int, *, wrong: str = "") -> int:
    """Counted chunk by chunk, each reading all before it; `wrong` names a slip to make."""
    starts = list(range(0, prompt, chunk))
    if wrong == "round down":
        starts = starts[: max(1, prompt // chunk)]
    n = len(starts)
    if wrong == "first too":
        return sum(stored + start for start in starts)
    if wrong == "one less":
        return (n - 1) * (stored + chunk * (n - 1) / 2)
    if wrong == "exact":
        return (n - 1) * (stored + prompt / 2)
    if wrong == "own":
        return (n - 1) * stored + chunk * n * (n + 1) // 2
    if wrong == "last":
        return stored + starts[-1] if n > 1 else 0
    history = {"no history": 0, "history once": min(n - 1, 1) * stored}.get(wrong, (n - 1) * stored)
    return history + sum(starts)


def read_cases(draw: Draw) -> Iterator[tuple]:
    """One chunk, more chunk than prompt, exact and ragged cuts, one token more than a chunk; then at random."""
    yield 10, 10, 7
    yield 5, 8, 3
    yield 16, 4, 0  # with three chunks some slips give the same
    yield 12, 4, 5
    yield 13, 4, 0
    yield 9, 8, 2
    yield 6, 1, 1
    for _ in range(25):
        chunk = draw.randrange(1, 600)
        yield draw.randrange(1, 9000), chunk, draw.choice([0, draw.randrange(5000)])


def read_slip(slip: str) -> Callable:
    """`right_read_again` with one slip."""
    return lambda *case: right_read_again(*case, wrong=slip)


READ_MISTAKES = {
    "a last chunk that is not full is a chunk: round the number of chunks up": read_slip("round down"),
    "every chunk reads what was stored before the prompt, not only its own prompt": read_slip("no history"),
    "each chunk after the first reads the stored tokens once more": read_slip("history once"),
    "one piece reads the stored tokens too; count only what comes on top": read_slip("first too"),
    "n chunks cover n · chunk tokens, which is more than the prompt where the cut is ragged": read_slip("exact"),
    "a chunk has its own keys and values at hand; it reads those before it: n - 1, not n + 1": read_slip("own"),
    "that is what the last chunk reads; those before it read as well": read_slip("last"),
    "of their own prompt the chunks read 0, c, 2c, ..., (n - 1) c, on average (n - 1) c / 2; they are n": read_slip(
        "one less"
    ),
}


def experiment(largest: float, waiting: str, first_token: str, enough: float, offline: str) -> None:
    """Exercise "By experiment": the largest budget within the target, and what the table shows."""
    work_out(
        "largest",
        largest,
        LARGEST_WITHIN,
        {
            2 * LARGEST_WITHIN: "its p99 gap is above 60 ms",
            LARGEST_WITHIN / 2: "that budget meets the target, but a larger one does too",
        },
        unit="tokens",
        tolerance=1e-6,
    )
    pieces = {
        "it hardly changes": "",
        "it shrinks in proportion": "compare the two rows: larger pieces are fewer, but each takes longer",
        "it grows in proportion": "that is the gap; look at the next column",
    }
    choice(waiting, "it hardly changes", pieces, name="waiting")
    causes = {
        "prompts wait in a queue": "",
        "each step is longer": "look at the gaps: steps are shorter",
        "decodes go last": "decodes come first whatever the budget",
    }
    choice(first_token, "prompts wait in a queue", causes, name="first_token")
    work_out(
        "enough",
        enough,
        ENOUGH_OFFLINE,
        {
            ENOUGH_OFFLINE / 2: "its tokens a second are more than 5% below the best",
            2 * ENOUGH_OFFLINE: "a smaller budget is within 5% of the best too",
        },
        unit="tokens",
        tolerance=1e-6,
    )
    pays = {
        "a larger budget": "",
        "a smaller budget": "then every step would pay for reading the weights on top, and there would be more steps",
        "the same": "reading then costs time in every step, so fewer steps cost less",
    }
    choice(offline, "a larger budget", pays, name="offline")
