"""Checks for the exercises of chapter 6: empty slots, admission, a scheduler, goodput, where static is as good."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

from minillm.lab import checks
from minillm.lab.answers import build, work_out
from minillm.lab.answers.ch06_drive import drive, schedule_cases
from minillm.lab.checks import Draw, NotAnswered, choice

LENGTHS, LONG, SHORT, SLOTS = (12, 40, 8, 20), 1000, 10, 8  # "Slots that wait"


def slots(used: float, gain: float, one_long: float, exponential: float) -> None:
    """Exercise "Slots that wait": per cent of the slots used, and the gain at most, for three kinds of lengths."""
    mean, longest, size = sum(LENGTHS) / len(LENGTHS), max(LENGTHS), len(LENGTHS)
    share = 100 * mean / longest
    work_out(
        "used",
        used,
        share,
        {
            100 - share: "that is the share that waits",
            share / 100: "that is a fraction; a share in % is asked for",
            100 * longest / sum(LENGTHS): "divide by the slots of all steps: the longest length times the batch",
        },
        unit="%",
    )
    work_out(
        "gain",
        gain,
        longest / mean,
        {
            mean / longest: "that is the share of slots used; the gain is its inverse",
            size: "that would be the gain over one slot; static batching uses some of the others",
        },
        unit="times the throughput",
    )
    slots_of_eight(one_long, exponential)


def slots_of_eight(one_long: float, exponential: float) -> None:
    """The second half of `slots`: eight slots with one long answer among them, and with lengths drawn at random."""
    few = LONG + (SLOTS - 1) * SHORT
    work_out(
        "one_long",
        one_long,
        100 * few / (SLOTS * LONG),
        {
            100 / SLOTS: "the short ones work for a few steps too",
            100 * SHORT / LONG: "the long one keeps its slot busy all the time",
            100 * (LONG + SLOTS * SHORT) / (SLOTS * LONG): "one of the eight is the long one: seven are short",
            few / (SLOTS * LONG): "that is a fraction; a share in % is asked for",
        },
        unit="%",
        tolerance=0.005,
    )
    harmonic = sum(1 / k for k in range(1, SLOTS + 1))
    work_out(
        "exponential",
        exponential,
        harmonic,
        {
            2 * SLOTS / (SLOTS + 1): "that is the formula for lengths up to a limit, all equally likely",
            harmonic - 1: "the sum starts with 1",
            harmonic - 1 / SLOTS: "the sum goes on to 1/B, the last one included",
            sum(1 / k for k in range(1, SLOTS + 2)): "the sum ends at 1/B",
            math.log(SLOTS): "the logarithm is near the sum for large B; for 8 slots add the terms",
        },
        unit="times the throughput",
    )


def admit(answer: Callable) -> None:
    """Exercise "Who may join": how many of the waiting are let in.

    waiting: prompt lengths, first come first; stored: tokens that each running request has stored; free: blocks;
    places: slots in all; block_size: tokens a block.
    """
    build("admit", answer, right_admit, admit_cases, ADMIT_MISTAKES)


def right_admit(
    waiting: Sequence[int], stored: Sequence[int], free: int, places: int, block_size: int, *, wrong: str = ""
) -> int:
    """First come, first served, with the next token of all who run promised; `wrong` names a slip to make."""
    promised = sum(tokens % block_size == (1 if wrong == "after" else 0) for tokens in stored)
    promised = {"no promise": 0, "one each": len(stored)}.get(wrong, promised)
    left, admitted = free - promised, 0
    room = places if wrong == "all places" else places - len(stored)
    for prompt in waiting:
        tokens = prompt + (wrong != "prompt only")
        need = tokens // block_size if wrong == "round down" else -(-tokens // block_size)
        if admitted == room and wrong != "no places":
            break
        if need > left or (wrong == "strictly" and need == left):
            if wrong == "passing":
                continue
            break
        admitted, left = admitted + 1, left - (0 if wrong == "forgets" else need)
    return admitted


def admit_cases(draw: Draw) -> Iterator[tuple]:
    """Nobody waits; nobody runs; edges of blocks; a large one before small ones; no place; then at random."""
    yield [], [5, 8], 3, 4, 4
    yield [5], [], 1, 3, 4
    yield [8], [], 2, 3, 4
    yield [5, 5], [], 3, 3, 4
    yield [7, 8, 30], [], 4, 3, 4  # 2 + 3 blocks are more than 4
    yield [8], [], 3, 3, 4
    yield [3, 3], [5, 6], 2, 4, 4
    yield [3], [4, 8], 3, 4, 4
    yield [3], [4, 5, 6], 1, 4, 4
    yield [40, 2, 2], [3], 5, 4, 4
    yield [2, 2, 2, 2], [5, 6], 50, 3, 4
    for _ in range(25):
        size = draw.choice([1, 3, 4, 16])
        waiting = [draw.randrange(1, 5 * size) for _ in range(draw.randrange(1, 8))]
        stored = [draw.randrange(1, 5 * size) for _ in range(draw.randrange(5))]
        yield waiting, stored, draw.randrange(len(stored), 18), len(stored) + draw.randrange(5), size


def admit_slip(slip: str) -> Callable:
    """`right_admit` with one slip."""
    return lambda *case: right_admit(*case, wrong=slip)


ADMIT_MISTAKES = {
    "each admitted request takes its blocks; there are fewer for the next": admit_slip("forgets"),
    "a small request passed a large one that does not fit: stop there, or the large one may wait for ever": admit_slip(
        "passing"
    ),
    "a request needs blocks for its prompt and the token after it": admit_slip("prompt only"),
    "a block that is filled in part is a whole block: round up": admit_slip("round down"),
    "those who run were promised the block of their next token": admit_slip("no promise"),
    "only a request whose blocks are full needs one for its next token": admit_slip("one each"),
    "with n stored tokens the next one is stored at place n: a new block is due when n is a multiple of block_size": (
        admit_slip("after")
    ),
    "the running ones sit in their places: places - len(stored) are left": admit_slip("all places"),
    "there are more of them than places": admit_slip("no places"),
    "a request that takes the very last free block fits": admit_slip("strictly"),
}


def schedule(answer: Callable) -> None:
    """Exercise "A scheduler that loses nobody": (waiting, running, pool, batch_size) -> the jobs of this step.

    The check lets jobs of random lengths arrive at random, and looks at every list and block after every step.
    """

    def reference(num_blocks, block_size, batch_size, jobs):
        """A run in which nothing goes wrong."""
        return ""

    if not callable(answer):
        raise NotAnswered("not answered yet: schedule")

    @functools.wraps(answer)  # so that a line of it can be named
    def driven(num_blocks, block_size, batch_size, jobs):
        return drive(answer, num_blocks, block_size, batch_size, jobs)

    checks.check(reference, driven, schedule_cases, compare=lambda _, wrong: wrong or None, name="schedule")


def goodput(answer: Callable) -> None:
    """Exercise "Fast enough for whom": requests per second that meet both targets.

    requests: (arrival, [time of each token]) in seconds; ttft and tpot: the targets, in seconds.
    """
    build("goodput", answer, right_goodput, goodput_cases, GOODPUT_MISTAKES)


def right_goodput(requests: Sequence[tuple[float, list[float]]], ttft: float, tpot: float, *, wrong="") -> float:
    """From the definitions of `minillm.metrics`; `wrong` names a slip to make."""
    good = tokens = 0
    for arrival, times in requests:
        first = times[0] - (0 if wrong == "clock" else arrival)
        gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
        pace = {
            "n": (times[-1] - times[0]) / len(times),
            "arrival": (times[-1] - arrival) / len(times),
            "worst": max(gaps, default=0.0),
        }.get(wrong, sum(gaps) / len(gaps) if gaps else (math.inf if wrong == "single" else 0.0))
        kept = (first < ttft, pace < tpot) if wrong == "strictly" else (first <= ttft, pace <= tpot)
        met = any(kept) if wrong == "either" else kept[0] if wrong == "ttft" else all(kept)
        good, tokens = good + met, tokens + met * len(times)
    starts, ends = [arrival for arrival, _ in requests], [times[-1] for _, times in requests]
    span = max(ends) - {"zero": 0.0, "first token": min(t[0] for _, t in requests)}.get(wrong, min(starts))
    span = (ends[-1] - starts[0] if wrong == "order" else span) or math.nan  # some slips have none
    return {"share": good / len(requests), "tokens": tokens / span}.get(wrong, good / span)


def goodput_cases(draw: Draw) -> Iterator[tuple]:
    """One request, each edge once, ends out of order; then at random. Times are multiples of 1/64, so exact."""
    yield [(1.0, [1.25, 1.5, 1.75])], 0.5, 0.5
    yield [(1.0, [1.5, 1.75, 2.0])], 0.5, 0.5  # on target to the bit
    yield [(1.0, [1.25, 1.5, 1.75])], 0.5, 0.25
    yield [(3.0, [3.25])], 0.5, 0.125
    yield [(2.0, [4.0, 4.25])], 1.0, 0.5  # one target met
    yield [(5.0, [5.25, 9.0])], 0.5, 0.5
    yield [(8.0, [8.25, 8.5, 9.5])], 0.5, 0.4375  # two gaps, not three
    yield [(1.0, [2.0, 2.125, 2.25])], 1.5, 0.25
    yield [(8.0, [8.25, 8.5, 9.5])], 0.5, 0.75
    yield [(5.0, [5.25, 9.0]), (6.0, [6.5, 6.75, 7.0])], 0.5, 5.0
    for _ in range(20):
        arrival, requests = draw.randrange(64, 512) / 64, []
        for _ in range(draw.randrange(2, 8)):
            arrival += draw.randrange(64) / 64
            times = [arrival + draw.randrange(1, 96) / 64]
            for _ in range(draw.choice([0, 1, 4, 9])):
                times.append(times[-1] + draw.randrange(1, 64) / 64)
            requests.append((arrival, times))
        yield requests, draw.randrange(32, 96) / 64, draw.randrange(16, 48) / 64


def goodput_slip(slip: str) -> Callable:
    """`right_goodput` with one slip."""
    return lambda *case: right_goodput(*case, wrong=slip)


GOODPUT_MISTAKES = {  # what a single request can tell apart comes first
    "a single token has no gap, and meets any TPOT": goodput_slip("single"),
    "a request that is on target to the bit meets it": goodput_slip("strictly"),
    "n tokens have n - 1 gaps: divide by one less": goodput_slip("n"),
    "TPOT starts at the first token; what is before it is TTFT": goodput_slip("arrival"),
    "TPOT is the mean gap, not the largest": goodput_slip("worst"),
    "TPOT has a target too": goodput_slip("ttft"),
    "a request must meet both targets, not one of them": goodput_slip("either"),
    "TTFT starts at the arrival of the request": goodput_slip("clock"),
    "the clock did not start at 0: count from the first arrival": goodput_slip("zero"),
    "the span starts at the first arrival, not at the first token": goodput_slip("first token"),
    "the last request in the list need not be the last to end": goodput_slip("order"),
    "that is the share of the requests; goodput is a rate: per second": goodput_slip("share"),
    "goodput counts requests, not tokens": goodput_slip("tokens"),
}


def as_good(equal: float, larger_batch: str, arrivals: str, conclusion: str) -> None:
    """Exercise "Where static is as good": ratio for equal lengths, and what the experiments show."""
    work_out(
        "equal",
        equal,
        1,
        {0: "that would mean that continuous batching delivers nothing", 2: "look at the first row once more"},
        unit="times the throughput",
        tolerance=0.05,
    )
    grows = {
        "it grows": "",
        "it shrinks": "read the rows of varied lengths from left to right",
        "it stays": "only equal lengths stay where they are; read the other rows",
    }
    choice(larger_batch, "it grows", grows, name="larger_batch")
    waits = {
        "a newcomer waits for a batch to end": "",
        "its steps are longer": "look at TPOT: no step of a static batch is longer for it",
        "its slots are empty at the end of a batch": "the lengths are equal: all of a batch end together",
    }
    choice(arrivals, "a newcomer waits for a batch to end", waits, name="arrivals")
    reasons = {
        "lengths are equal and all arrive together": "",
        "lengths are equal": "look at the second table: equal lengths that arrive over time wait for a batch to end",
        "the batch is large": "a larger batch has a longer longest",
        "answers are short": "it is the spread that counts; short answers can differ as much, for their size",
    }
    choice(conclusion, "lengths are equal and all arrive together", reasons, name="conclusion")
