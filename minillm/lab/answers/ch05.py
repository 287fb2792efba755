"""Checks for the exercises of chapter 5: waste by pencil, a pool that remembers, beams, the block size."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from minillm.lab.answers import build, work_out
from minillm.lab.checks import CheckFailed, Draw, choice

# Conditions of "Waste by pencil" and of "The block size". The exercises state them in words, and a test compares.
TOKENS, BLOCK, LIMIT, MOST = 300, 32, 2048, 4
SHORT, LONG, ALLOWED, WORST_BLOCK = 80, 500, 5, 16


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
    work_out("reserved", reserved, 100 * (1 - TOKENS / LIMIT), remarks, unit="%")
    right = largest_size(TOKENS, MOST)
    remarks = {
        2 * right: f"with blocks of {2 * right} it is {waste_of(TOKENS, 2 * right):.1f}%",
        right / 2: f"blocks of {right} stay below {MOST}% as well",
        25: "that many slots would do, but it is no power of two",
    }
    work_out("largest", largest, right, remarks, unit="slots", tolerance=1e-6)


def pool(answer: Callable) -> None:
    """Exercise "A pool that remembers": a class with allocate, free, fork and num_free, driven by a script of calls."""
    mistakes = {remark: with_script(functools.partial(RightPool, slip=slip)) for slip, remark in POOL_SLIPS.items()}
    build("pool", with_script(answer), with_script(RightPool), pool_cases, mistakes, compare_logs)


class RightPool:
    """Free blocks in the order in which they are used again; `slip` names a mistake to make."""

    def __init__(self, num_blocks: int, slip: str = ""):
        self.slip = slip
        self.queue = dict.fromkeys(range(num_blocks))  # keeps the order, and any block can be taken out at once
        self.users = [0] * num_blocks

    def allocate(self) -> int | None:
        """The block that has been free for longest, or None."""
        if not self.queue:
            return None
        block = list(self.queue)[-1 if self.slip == "newest" else 0]
        del self.queue[block]
        self.users[block] = 1
        return block

    def free(self, blocks: Sequence[int]) -> None:
        """One user less for each; who has none left joins the end of the queue, the last block first."""
        for block in blocks if self.slip == "forwards" else reversed(blocks):
            self.users[block] -= 1
            if not self.users[block] or self.slip == "uncounted":
                self.queue[block] = None

    def fork(self, blocks: Sequence[int]) -> None:
        """One user more for each; a free block is taken back from the queue."""
        for block in blocks:
            self.users[block] += 1
            if self.slip != "left in the queue":
                self.queue.pop(block, None)

    def num_free(self) -> int:
        """Blocks without users."""
        return len(self.queue)


POOL_SLIPS = {
    "newest": "the block freed last is used first here; take the one that has been free for longest",
    "forwards": "the first block of a sequence is freed first here; go from the last to the first",
    "uncounted": "a block is free only when its last user has freed it",
    "left in the queue": "a free block that is forked is in use again: take it out of the queue",
}


def with_script(pool: Callable) -> Callable:
    """A function that makes a pool of that kind, plays a script of calls on it, and returns what each gave."""
    if not callable(pool):
        return pool

    @functools.wraps(pool)
    def play(num_blocks: int, script: list[tuple]):
        made, log = pool(num_blocks), []
        for name, *arguments in script:
            given = getattr(made, name)(*arguments)
            log.append((given if name == "allocate" else None, made.num_free()))
        return None if log[0] == (None, None) else log

    play.__signature__ = inspect.signature(lambda num_blocks, script: None)  # what a message calls the arguments
    return play


def compare_logs(expected: list, given: list, num_blocks: int, script: list[tuple]) -> str | None:
    """The first call that gave something else, or left another number of free blocks."""
    for (name, *arguments), right, found in zip(script, expected, given, strict=True):
        call = f"{name}({', '.join(map(str, arguments))})"
        if right[0] != found[0]:
            return f"{call} should give {right[0]}, got {found[0]!r}"
        if right[1] != found[1]:
            return f"after {call} num_free() should be {right[1]}, got {found[1]!r}"
    return None


def pool_cases(draw: Draw) -> Iterator[tuple]:
    """Used up; freed and used again; shared; taken back while free; then long random scripts."""
    get = ("allocate",)
    yield 2, [get, get, get]
    yield 3, [get, get, ("free", [0, 1]), get, get, get]
    yield 4, [get, get, ("fork", [0, 1]), ("free", [0, 1]), ("free", [0]), get, get, get]
    yield 3, [get, get, ("free", [0, 1]), ("fork", [0]), get, get, get, ("free", [0]), get]
    for _ in range(6):
        yield random_script(draw, draw.randrange(5, 9))


def random_script(draw: Draw, num_blocks: int) -> tuple[int, list[tuple]]:
    """Calls that a correct pool can serve: sequences take blocks, are forked, end, and are asked for again."""
    made, held, gone, script = RightPool(num_blocks), [], [], []
    for _ in range(40):
        event = draw.random()
        if event < 0.5 or not held:
            script.append(("allocate",))
            block = made.allocate()
            gone = [blocks for blocks in gone if block not in blocks]  # what it held is overwritten
            if block is not None:
                held.append([block]) if draw.random() < 0.4 or not held else draw.choice(held).append(block)
        elif event < 0.65 or (event < 0.8 and gone):
            blocks = draw.choice(gone if event >= 0.65 else held)
            script.append(("fork", list(blocks)))
            made.fork(blocks)
            held.append(list(blocks))
        else:
            gone.append(held.pop(draw.randrange(len(held))))
            script.append(("free", list(gone[-1])))
            made.free(gone[-1])
    return num_blocks, script


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
    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, list) for part in result)):
        return f"the result should be two lists, (tables, copies), got {result!r}"
    new, copies = result
    pairs = all(isinstance(pair, tuple) and len(pair) == 2 for pair in copies)
    if len(new) != len(parents) or not all(isinstance(table, (list, tuple)) for table in new) or not pairs:
        return f"there should be {len(parents)} tables, and copies as pairs (source, target), got {result!r}"
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
                return f"new beam {j} no longer reads token {t} of its parent, beam {parent}"
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
    """A prompt that all beams share, whole blocks and partial ones; then many steps of beams that come and go."""
    for length, size in ((3, 2), (4, 2), (5, 1)):
        blocks = -(-length // size)
        yield [list(range(blocks))] * 2, [0, 1], length, size, [2] * blocks + [0] * 9, list(range(blocks, blocks + 9))
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


def block_size(short: float, long: float, worst: float, conclusion: str) -> None:
    """Exercise "The block size": largest sizes that waste little, the worst case, and what follows."""
    for name, answer, tokens in (("short", short, SHORT), ("long", long, LONG)):
        right = largest_size(tokens, ALLOWED)
        if isinstance(answer, (int, float)) and answer > 1 and answer != int(answer):
            raise CheckFailed(f"{name}: {answer:,.6g} is not right; a block has a whole number of slots")
        remarks = {
            2 * right: f"there the waste is above {ALLOWED}%",
            right / 2: f"the next size stays below {ALLOWED}% as well",
            largest_size(LONG if name == "short" else SHORT, ALLOWED): "look at the other column",
        }
        work_out(name, answer, right, remarks, unit="slots", tolerance=1e-6)
    remarks = {
        (WORST_BLOCK - 1) / 2: "that is the average over all lengths; here every last block has one token",
        1: "that many are in use; how many are empty?",
        WORST_BLOCK: "one token is in the last block",
    }
    work_out("worst", worst, WORST_BLOCK - 1, remarks, unit="slots", tolerance=1e-6)
    reasons = {
        "short answers need small blocks": "",
        "long answers need small blocks": "the empty slots of one last block weigh less in a long sequence",
        "the length does not matter": "compare the two columns at blocks of 64",
    }
    choice(conclusion, "short answers need small blocks", reasons, name="conclusion")
