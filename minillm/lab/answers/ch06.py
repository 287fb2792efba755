"""Checks for the exercises of chapter 6: empty slots, admission, a scheduler, goodput, where static is as good."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from minillm.lab import checks
from minillm.lab.answers import build, work_out
from minillm.lab.answers.ch06_drive import drive, schedule_cases
from minillm.lab.answers.ch06_goodput import GOODPUT_MISTAKES, goodput_cases, right_goodput
from minillm.lab.checks import Draw, NotAnswered, choice

LENGTHS, LONG, SHORT, SLOTS = (12, 40, 8, 20), 1000, 10, 8  # "Slots that wait"
SORTED, JOINED = 52, 52  # steps for two rounds of LENGTHS in four slots; a test plays them
UNSORTED_RATIO, SORTED_RATIO = 2.28, 1.11  # "Where static is as good", eight slots; a test runs its cell


def slots(used: float, gain: float, one_long: float, sorted_static: float, continuous: float) -> None:
    """Exercise "Slots that wait": per cent of the slots used, the gain at most, and steps of a queue that ends."""
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
    one_of_eight(one_long)
    twice(sorted_static, continuous)


def one_of_eight(one_long: float) -> None:
    """The part of `slots` with eight slots and one long answer among them."""
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


def twice(sorted_static: float, continuous: float) -> None:
    """The part of `slots` with a queue that ends: steps of static batches of alike lengths, and of continuous ones."""
    in_turn, full = 2 * max(LENGTHS), 2 * sum(LENGTHS) // len(LENGTHS)
    work_out(
        "sorted_static",
        sorted_static,
        SORTED,
        {
            in_turn: "that is in order of arrival: sort all eight first",
            2 * SORTED: "each batch runs as long as its own longest answer, not as the longest of all",
            max(LENGTHS): "that is the second batch; the first one ran before it",
        },
        unit="steps",
        tolerance=1e-6,
    )
    work_out(
        "continuous",
        continuous,
        JOINED,
        {
            in_turn: "that is static batching: the fifth joins when the first is done, not when all are",
            full: "that is with no slot ever empty; at the end some are",
            JOINED - max(LENGTHS): "that is when the last one joins; the longest still runs",
        },
        unit="steps",
        tolerance=1e-6,
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
    promised = {"no promise": 0, "one each": len(stored), "one in all": min(promised, 1)}.get(wrong, promised)
    left, admitted = free - promised, 0
    room = places if wrong == "all places" else places - len(stored)
    for prompt in waiting:
        tokens = prompt + (wrong != "prompt only")
        need = tokens // block_size if wrong == "round down" else -(-tokens // block_size)
        need = -(-prompt // block_size) + 1 if wrong == "a block more" else need
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
    yield [3, 3], [], 3, 3, 4
    yield [3, 3], [5, 6], 2, 4, 4
    yield [3], [4, 8], 3, 4, 4
    yield [3], [4, 5, 6], 1, 4, 4
    yield [3], [4, 8], 2, 4, 4  # two blocks promised, none left
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
    "every full one is promised a block, not one of them": admit_slip("one in all"),
    "those who run were promised the block of their next token": admit_slip("no promise"),
    "only a request whose blocks are full needs one for its next token": admit_slip("one each"),
    "with n stored tokens the next one is stored at place n: a new block is due when n is a multiple of block_size": (
        admit_slip("after")
    ),
    "the running ones sit in their places: places - len(stored) are left": admit_slip("all places"),
    "there are more of them than places": admit_slip("no places"),
    "a request that takes the very last free block fits": admit_slip("strictly"),
    "one token more is not one block more: add it to the prompt before you round up": admit_slip("a block more"),
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


def as_good(sorted_queue: float, arrivals: str, hindrance: str, conclusion: str) -> None:
    """Exercise "Where static is as good": the ratio that sorting leaves, and what the experiments show."""
    work_out(
        "sorted_queue",
        sorted_queue,
        SORTED_RATIO,
        {
            UNSORTED_RATIO: "that is in order of arrival; sort the static server's queue",
            1 / SORTED_RATIO: "continuous over static, not the other way round",
        },
        unit="times the throughput",
        tolerance=0.02,
    )
    waits = {
        "a newcomer waits for a batch to end": "",
        "its steps are longer": "look at TPOT: no step of a static batch is longer for it",
        "its slots are empty at the end of a batch": "the lengths are equal: all of a batch end together",
    }
    choice(arrivals, "a newcomer waits for a batch to end", waits, name="arrivals")
    hindrances = {
        "nobody knows the lengths beforehand": "",
        "sorting takes too long": "64 numbers are sorted in far less time than one step takes",
        "long answers fill the memory": "the same requests need the same blocks, whatever their order",
    }
    choice(hindrance, "nobody knows the lengths beforehand", hindrances, name="hindrance")
    reasons = {
        "lengths are alike within a batch and all are there at once": "",
        "lengths are equal": "look at the second table: equal lengths that arrive over time wait for a batch to end",
        "the batch is large": "a larger batch has a longer longest: read the rows from left to right",
        "answers are short": "it is the spread that counts; short answers can differ as much, for their size",
    }
    choice(conclusion, "lengths are alike within a batch and all are there at once", reasons, name="conclusion")
