"""Checks for the exercises of chapter 8: hits of a chat, insert and split, LRU with locks, a queue that thrashes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence

from minillm.lab.answers import build, work_out
from minillm.lab.answers.ch08_evict import EVICT_MISTAKES, evict_cases, right_evict
from minillm.lab.checks import CheckFailed, Draw, choice, plain

# Conditions of "The hits of a chat". The exercise states them in words, and a test compares.
TURNS, MESSAGE, REPLY, BLOCK, PREFILL_SHARE = 4, 300, 100, 16, 0.5
# And of "A queue that thrashes": requests, different starts, starts that the pool holds.
REQUESTS, STARTS, ROOM = 40, 5, 4
BACK = 70  # % found there and back; a test plays it

Tree = dict[tuple, tuple]  # first block's tokens -> (tokens of the whole run, the tree below)


def chat_hits(rate: float, found: float, prompts_only: float, gain: float) -> None:
    """Exercise "The hits of a chat": hit rate at most, tokens the second turn finds, without answers, and the gain."""
    prompts = [turn * MESSAGE + (turn - 1) * REPLY for turn in range(1, TURNS + 1)]
    total, new = sum(prompts), TURNS * MESSAGE
    work_out(
        "rate",
        rate,
        100 * (1 - new / total),
        {
            1 - new / total: "a rate in % is asked for",
            100 * new / total: "that is the share that is new; the rest is found",
            100 * (1 - new / (new + (TURNS - 1) * REPLY)): "each turn sends its whole history: add up all four prompts",
            100 * (TURNS - 1) / TURNS: "the prompts are not equally long: count tokens, not turns",
            100 * sum(prompts[:-1]) / total: "that finds only the prompt before; its answer is in the cache as well",
        },
        unit="%",
    )
    found_by_second_turn(found)
    work_out(
        "prompts_only",
        prompts_only,
        100 * sum(prompts[:-1]) / total,
        {
            100 * (1 - new / total): "that is with the answers kept; without them, each answer but the last is new too",
            100 * (TURNS - 1) * MESSAGE / total: "each turn finds all of the prompt before it, not one message",
            sum(prompts[:-1]) / total: "a rate in % is asked for",
        },
        unit="%",
    )
    h = 1 - new / total
    work_out(
        "gain",
        gain,
        1 / (1 - PREFILL_SHARE * h),
        {
            1 / (1 - h): "that is what the prompts gain; the other half of the time is decoding, and stays",
            1 + PREFILL_SHARE * h: "the time shrinks to 1 - f h; the gain is its inverse",
            1 - PREFILL_SHARE * h: "that is the time that is left; the gain in throughput is its inverse",
            1 / (1 - PREFILL_SHARE): "that is for a hit rate of 1",
        },
        unit="times the throughput",
    )


def found_by_second_turn(found: float) -> None:
    """The part of `chat_hits` that asks for tokens: whole blocks of the first turn's prompt and answer."""
    stored = MESSAGE + REPLY - 1
    work_out(
        "found",
        found,
        stored // BLOCK * BLOCK,
        {
            stored: "only whole blocks are found",
            (MESSAGE + REPLY) // BLOCK * BLOCK: "the last token of the answer is never fed back, so its keys do not "
            "exist; the block that it would fill is not whole",
            MESSAGE // BLOCK * BLOCK: "the answer's keys and values are in the cache too",
            stored // BLOCK: "that is blocks; tokens are asked for",
            MESSAGE: "the answer's keys and values are in the cache too; and only whole blocks are found",
        },
        unit="tokens",
        tolerance=1e-6,
    )


def insert(answer: Callable) -> None:
    """Exercise "Insert and split": (tree, tokens, block size) -> blocks that were added; the tree is changed."""
    build("insert", with_tree(answer), with_tree(right_insert), insert_cases, INSERT_MISTAKES)


def with_tree(function: Callable) -> Callable:
    """The function over several texts: for each what it returned, and the tree in the end."""
    if not callable(function):
        return function

    @functools.wraps(function)  # so that a line of it can be named
    def all_of_them(texts, size):
        tree: Tree = {}
        added = [function(tree, list(text), size) for text in texts]
        if added and all(count is None or count is ... for count in added):
            return None
        return {"added": added, "tree": spelled(tree)}

    all_of_them.__signature__ = inspect.signature(lambda texts, size: None)
    return all_of_them


def spelled(tree: object) -> list[str]:
    """A tree as lines: depth, and the run of tokens; a fault of form is spelled out in place."""
    if not isinstance(tree, dict):
        return [f"not a dict: {tree!r}"]
    lines = []
    for key in sorted(tree, key=repr):
        entry = tree[key]
        if not (isinstance(entry, tuple) and len(entry) == 2):
            lines.append(f"under {key!r} there is no pair (tokens, tree below)")
            continue
        run, below = entry
        run = tuple(run) if isinstance(run, Sequence) else run
        lines.append(f"{tuple(key) if isinstance(key, Sequence) else key!r}: {run!r}")
        lines += ["  " + line for line in spelled(below)]
    return lines


def right_insert(tree: Tree, tokens: Sequence[int], size: int, *, wrong: str = "") -> int:
    """Walk along runs that agree, split the one that does not, hang the rest below; `wrong` names a slip."""
    rest = tuple(tokens)
    if wrong != "partial":
        rest = rest[: len(rest) // size * size]
    while rest:
        key = rest[: 1 if wrong == "token keys" else size]
        if key not in tree:
            tree[key] = (rest, {})
            return len(rest) // size
        run, below = tree[key]
        shared = common(run, rest, 1 if wrong == "mid-block" else size)
        if wrong == "first block only":
            shared = min(shared, size)
        if shared < len(run):
            if wrong == "no split" or not shared:
                tree[key] = (rest, {})
                return (len(rest) - shared) // size
            if shared == len(rest) and wrong == "lazy":
                return 0
            lower = {} if wrong == "children lost" else below
            tree[key] = (run[:shared], {run[shared:][: len(key)]: (run[shared:], lower)})
            if wrong == "children stay":
                tree[key] = (run[:shared], {run[shared:][: len(key)]: (run[shared:], {}), **below})
        rest, tree = rest[shared:], tree[key][1]
    return 0


def common(run: Sequence[int], rest: Sequence[int], size: int) -> int:
    """Tokens at the start of both that agree, in whole blocks of `size`."""
    shared = 0
    while shared + size <= min(len(run), len(rest)) and run[shared : shared + size] == rest[shared : shared + size]:
        shared += size
    return shared


def insert_cases(draw: Draw) -> Iterator[tuple]:
    """Nothing yet; a second branch; a split in a run with branches below; starts of starts; then at random."""
    yield [[1, 2, 3, 4]], 2
    yield [[1, 2, 3, 4, 5]], 2
    yield [[1, 2, 3, 4], [1, 2, 3, 4]], 2
    yield [[1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 4, 4]], 2
    yield [[1, 1, 2, 2, 3, 3], [1, 1]], 2
    yield [[1, 1], [1, 1, 2, 2, 3, 3]], 2
    yield [[1, 1, 2, 3], [1, 1, 2, 4]], 2
    yield [[1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 2, 2, 3, 3, 5, 5], [1, 1, 6, 6]], 2
    yield [[7], [], [7, 8]], 3
    for _ in range(12):
        size = draw.choice([1, 2, 3])
        yield [[draw.randrange(2) for _ in range(draw.randrange(6 * size))] for _ in range(draw.randrange(2, 9))], size


def insert_slip(slip: str) -> Callable:
    """`right_insert` with one slip, over several texts."""
    return with_tree(lambda tree, tokens, size: right_insert(tree, tokens, size, wrong=slip))


INSERT_SLIPS = {
    "partial": "the tokens behind the last whole block do not fill a block: leave them out",
    "no split": "where a text leaves a run in its middle, the run must be split: the old end went missing",
    "children lost": "a split leaves the lower part with all that was below it; those branches went missing",
    "children stay": "the branches of a run that is split belong below its lower part, not beside it",
    "mid-block": "runs part at the border of a block, not at a token: a block is shared whole or not at all",
    "token keys": "a run is found by the tokens of its whole first block: two may start with the same token",
    "lazy": "a text that ends within a run splits it too, so that there is a node at its end",
    "first block only": "follow a run as far as the text agrees, not for its first block only",
}
INSERT_MISTAKES = {remark: insert_slip(slip) for slip, remark in INSERT_SLIPS.items()}


def evict(answer: Callable) -> None:
    """Exercise "Who goes first?": ({name: (parent, blocks, last used, locks)}, count) -> names, one for each block."""
    build("evict", answer, right_evict, evict_cases, EVICT_MISTAKES)


def thrash(cyclic: float, there_and_back: float, together: float, conclusion: str) -> None:
    """Exercise "A queue that thrashes": hit rates of three settings in %, and what explains them."""
    cyclic = plain(cyclic)
    if isinstance(cyclic, int | float) and not isinstance(cyclic, bool) and cyclic != 0:
        at_random = 100 * ROOM / STARTS
        why = "four of five starts are in the pool at any time, but are they those that come next?"
        raise CheckFailed(
            f"cyclic: {cyclic:,.6g} % is not right; {why if abs(cyclic - at_random) < 5 else 'run it, and look'}"
        )
    work_out("cyclic", cyclic, 0, {}, unit="%")
    once = 100 * (1 - STARTS / REQUESTS)
    work_out(
        "there_and_back",
        there_and_back,
        BACK,
        {
            BACK / 100: "a rate in % is asked for",
            100 - BACK: "that is the share that is computed",
            once: "each end is asked for twice in a row, but the start furthest from it has been evicted by then",
            0: "run the experiment with this order",
        },
        unit="%",
    )
    work_out(
        "together",
        together,
        once,
        {
            100: "each start must be computed once",
            100 * (1 - 1 / STARTS): "each start is computed once in all 40 requests, not once in five",
            once / 100: "a rate in % is asked for",
            100 * STARTS / REQUESTS: "that is the share that is computed",
            0: "run the experiment with this setting",
        },
        unit="%",
    )
    reasons = {
        "the one that is needed next is evicted": "",
        "four fifths of the starts are in the pool": "they are, and still nothing is found: which one is missing?",
        "blocks are too large": "the starts are whole blocks here; smaller ones would change nothing",
        "locks keep too much": "one request runs at a time, and only its own path is locked",
    }
    choice(conclusion, "the one that is needed next is evicted", reasons, name="conclusion")
