"""Checks for the exercises of chapter 5: waste by pencil, a pool that remembers, beams, the block size."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator

from minillm.lab.answers import build, work_out
from minillm.lab.answers.ch05_pool import POOL_SLIPS, RightPool, compare_logs, pool_cases, with_script
from minillm.lab.checks import CheckFailed, Draw, choice, describe

# Conditions of "Waste by pencil" and of "The block size". The exercises state them in words, and a test compares.
TOKENS, BLOCK, LIMIT, MOST = 300, 32, 2048, 4
SHORT, LONG, ALLOWED, PAGE, ALIKE = 80, 500, 5, 16, (250, 258)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def waste_of(tokens: float, size: int) -> float:
    """Expected percent of handed-out slots that are empty, for sequences of `tokens` tokens on average."""
    return 100 * (size - 1) / 2 / (tokens + (size - 1) / 2)


def largest_size(tokens: float, percent: float) -> int:
    """The largest power of two whose expected waste is below `percent`."""
    size = 1
    while waste_of(tokens, 2 * size) < percent:
        size *= 2
    return size


def waste(last: float, paged: float, reserved: float, largest: float) -> None:
    """Exercise "Waste by pencil": empty slots of the last block, and three consequences."""
    empty, expected = (BLOCK - 1) / 2, waste_of(TOKENS, BLOCK)
    remarks = {
        BLOCK / 2: "the last block of a sequence has at least one token: 0 to 31 slots are empty",
        BLOCK - 1: "that is the most; the average is asked for",
        BLOCK: "then the block would not have been handed out",
    }
    work_out("last", last, empty, remarks, unit="slots")
    remarks = {
        100 * empty / TOKENS: "divide by all that is handed out: the tokens and the empty slots",
        expected / 100: "that is the share; percent are asked for",
        100 * (BLOCK - 1) / (TOKENS + BLOCK - 1): "that takes the worst last block; take the average one",
        100 - expected: "that is the part in use",
    }
    work_out("paged", paged, expected, remarks, unit="%")
    remarks = {
        100 * TOKENS / LIMIT: "that is the part in use",
        1 - TOKENS / LIMIT: "that is the share; percent are asked for",
        100 * LIMIT / TOKENS: "divide the empty slots by all that is reserved",
    }
    work_out("reserved", reserved, 100 * (1 - TOKENS / LIMIT), remarks, unit="%", tolerance=0.004)
    right = largest_size(TOKENS, MOST)
    remarks = {
        2 * right: f"with blocks of {2 * right} it is {waste_of(TOKENS, 2 * right):.1f}%",
        right / 2: f"blocks of {right} stay below {MOST}% as well",
        25: "that many slots would do, but it is no power of two",
    }
    work_out("largest", largest, right, remarks, unit="slots", tolerance=1e-6)


def pool(answer: Callable) -> None:
    """Exercise "A pool that remembers": a class with allocate, free, fork and num_free, driven by a script of calls."""
    if answer is not None and answer is not ... and not callable(answer):
        raise CheckFailed(f"pool: expected a class, got {describe(answer)}")
    mistakes = {remark: with_script(functools.partial(RightPool, slip=slip)) for slip, remark in POOL_SLIPS.items()}
    build("pool", with_script(answer), with_script(RightPool), pool_cases, mistakes, compare_logs)


def next_beams(answer: Callable) -> None:
    """Exercise "The beams part": (tables, parents, length, size, users, free) -> (new tables, copies).

    Any choice of blocks is right that lets every new beam read its parent's tokens and write alone, with the fewest
    copies, and leaves the books in order.
    """
    build("next_beams", with_books(answer), with_books(right_beams), beam_cases, {}, compare_beams)


def with_books(step: Callable) -> Callable:
    """The function, returning `users` and `free` after the call as well."""
    if not callable(step):
        return step

    @functools.wraps(step)
    def call(tables, parents, length, size, users, free):
        result = step(tables, parents, length, size, users, free)
        return result if result is None or result is ... else (result, users, free)

    return call


def right_beams(tables, parents, length: int, size: int, users: list[int], free: list[int]):
    """Share everything with the parents, let the old beams go, then copy what is shared and about to be written."""
    new, copies, index = [list(tables[parent]) for parent in parents], [], length // size
    for block in (block for table in new for block in table):
        users[block] += 1
    for block in (block for table in tables for block in table):
        users[block] -= 1
        if not users[block]:
            free.append(block)
    for table in new:
        if index < len(table) and users[table[index]] == 1:
            continue
        if index < len(table):
            source = table.pop()
            users[source] -= 1
            copies.append((source, free[-1]))
        table.append(free.pop())
        users[table[-1]] = 1
    return new, copies


def compare_beams(expected, given, tables, parents, length, size, users, free) -> str | None:
    """What is wrong with the new beams, their copies, or the books."""
    result, users_after, free_after = given
    rows = (list, tuple)
    if not (isinstance(result, rows) and len(result) == 2 and all(isinstance(part, rows) for part in result)):
        return f"the result should be two lists, (tables, copies), got {result!r}"
    new, copies = result
    pairs = all(isinstance(pair, rows) and len(pair) == 2 for pair in copies)
    if len(new) != len(parents) or not all(isinstance(table, rows) for table in new) or not pairs:
        return (
            f"the result should be two lists, (tables, copies): {len(parents)} tables, and copies as pairs "
            f"(source, target), got {result!r}"
        )
    named = [block for part in (*new, *copies, free_after) for block in part]
    if strange := [block for block in named if not isinstance(block, int)]:
        return f"blocks are numbers; the result or `free` names {strange[0]!r}"
    blocks_of = Counter(block for table in new for block in table)
    memory = {block: [("old", block, place) for place in range(size)] for block in range(len(users))}
    if any(block not in memory for block in [*blocks_of, *(block for pair in copies for block in pair)]):
        return f"there are blocks 0 to {len(users) - 1}; the result names others: {new}, {list(copies)}"
    taken = {target: list(memory[source]) for source, target in copies}  # all copies happen at once
    memory = {block: taken.get(block, content) for block, content in memory.items()}
    for j, (table, parent) in enumerate(zip(new, parents, strict=True)):
        if len(table) != length // size + 1:
            return f"new beam {j} has {len(table)} blocks; to write token {length} it needs {length // size + 1}"
        for t in range(length):
            block, place = tables[parent][t // size], t % size
            if memory[table[t // size]][place] != ("old", block, place):
                again = {source for source, _ in copies} & set(taken)
                why = f"; all copies are made at once, so block {min(again)} gives what it held before" if again else ""
                return f"new beam {j} no longer reads token {t} of its parent, beam {parent}{why}"
    for j, table in enumerate(new):
        if blocks_of[table[-1]] > 1:
            return f"new beam {j} would write into block {table[-1]}, which another beam uses too"
    if len(copies) > len(expected[0][1]):
        return f"{len(copies)} copies where {len(expected[0][1])} will do: the last user of a block writes in place"
    for block, count in enumerate(users_after):
        if count != blocks_of[block]:
            return f"users[{block}] is {count}, but {blocks_of[block]} new beams use the block"
    if sorted(free_after) != [block for block in range(len(users)) if not blocks_of[block]]:
        return f"free should hold the blocks that no beam uses, once each; got {free_after}"
    return None


def beam_cases(draw: Draw) -> Iterator[tuple]:
    """A prompt that two beams share, whole blocks and partial ones, or three; then many steps, beams come and go."""
    for length, size in ((3, 2), (4, 2), (5, 1)):
        blocks = -(-length // size)
        yield [list(range(blocks))] * 2, [0, 1], length, size, [2] * blocks + [0] * 9, list(range(blocks, blocks + 9))
    yield [[0]] * 3, [0, 1, 2], 1, 2, [3, *[0] * 9], list(range(1, 10))
    for size in (3, 4, 2, 5):
        width, length = draw.randrange(2, 6), draw.randrange(1, 9)
        blocks, total = -(-length // size), 80
        tables, users = [list(range(blocks)) for _ in range(width)], [width] * blocks + [0] * (total - blocks)
        free = list(range(blocks, total))
        draw.shuffle(free)
        for _ in range(9):
            parents = [draw.randrange(width) for _ in range(width)]
            yield [list(table) for table in tables], parents, length, size, list(users), list(free)
            tables, _ = right_beams(tables, parents, length, size, users, free)
            length += 1


def waste_alike(tokens: int, size: int) -> float:
    """Percent of handed-out slots that are empty where every sequence holds so many tokens."""
    return 100 * (1 - tokens / (-(-tokens // size) * size))


def largest_alike(tokens: int) -> int:
    """The largest size of the table that wastes less than is allowed where every sequence holds so many tokens."""
    return max(size for size in SIZES if waste_alike(tokens, size) < ALLOWED)


def block_size(mean: float, at250: float, at258: float, conclusion: str) -> None:
    """Exercise "The block size": a mean length for blocks of 16, sizes for lengths that are all alike, what follows."""
    empty = (PAGE - 1) / 2
    remarks = {
        100 * empty / ALLOWED: f"so many slots are handed out to a sequence; {empty} of them hold no token",
        100 * (PAGE - 1) / ALLOWED: "that takes the worst last block; take the average one",
        (100 / ALLOWED - 1) * (PAGE - 1): "that takes the worst last block; take the average one",
    }
    work_out("mean", mean, (100 / ALLOWED - 1) * empty, remarks, unit="tokens", tolerance=0.04)
    for name, answer, tokens, other in (("at250", at250, *ALIKE), ("at258", at258, *ALIKE[::-1])):
        right = largest_alike(tokens)
        remarks = {
            largest_size(tokens, ALLOWED): "that is right where lengths vary; here every last block is filled alike",
            largest_alike(other): f"that is for {other} tokens",
            right / 2: f"the next size stays below {ALLOWED}% as well",
            2 * max(SIZES): f"the table ends at {max(SIZES)}",
        }
        work_out(name, answer, right, remarks, unit="slots", tolerance=1e-6)
    reasons = {
        "short answers need small blocks": "",
        "long answers need small blocks": "the empty slots of one last block weigh less in a long sequence",
        "the length does not matter": "compare the first two columns at blocks of 64",
    }
    choice(conclusion, "short answers need small blocks", reasons, name="conclusion")
