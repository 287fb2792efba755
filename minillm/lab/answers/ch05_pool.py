"""The check of chapter 5's pool: it plays scripts of calls, and says which calls lead to the first wrong result."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from minillm.lab.checks import Draw


class RightPool:
    """Free blocks in the order in which they are used again; `slip` names a mistake to make."""

    def __init__(self, num_blocks: int, slip: str = ""):
        self.slip = slip
        self.queue = dict.fromkeys(range(num_blocks))  # keeps the order, and any block can be taken out at once
        self.users = [0] * num_blocks

    def allocate(self) -> int | None:
        """The block that has been free for longest, or None."""
        while self.slip == "old place" and self.queue and self.users[next(iter(self.queue))]:
            del self.queue[next(iter(self.queue))]
        if not self.queue:
            return None
        block = list(self.queue)[-1 if self.slip == "newest" else 0]
        del self.queue[block]
        self.users[block] = 1
        return block

    def free(self, blocks: Sequence[int]) -> None:
        """One user less for each; who has none left joins the end of the queue, the last block first."""
        orders = {"forwards": blocks, "by number": sorted(blocks, reverse=True)}
        for block in orders.get(self.slip, reversed(blocks)):
            self.users[block] -= 1
            if not self.users[block] or self.slip == "uncounted":
                self.queue[block] = None

    def fork(self, blocks: Sequence[int]) -> None:
        """One user more for each; a free block is taken back from the queue."""
        for block in blocks:
            self.users[block] += 1
            if self.slip not in ("left in the queue", "old place"):
                self.queue.pop(block, None)

    def num_free(self) -> int:
        """Blocks without users."""
        return self.users.count(0) if self.slip == "old place" else len(self.queue)


POOL_SLIPS = {
    "newest": "the block freed last is used first here; take the one that has been free for longest",
    "forwards": "the first block of a sequence is freed first here; go from the last to the first",
    "by number": "blocks are freed by their numbers here; the last in the list is the last of the sequence",
    "old place": "a block that was forked while free and is freed again keeps its old place; it has to go to the end",
    "uncounted": "a block is free only when its last user has freed it",
    "left in the queue": "a free block that is forked is in use again: take it out of the queue",
}


@dataclass(frozen=True, repr=False)
class Script:
    """Calls to make on a pool, each a method's name and its arguments."""

    calls: Sequence[tuple]

    def __iter__(self) -> Iterator[tuple]:
        return iter(self.calls)

    def __repr__(self) -> str:
        return f"{len(self.calls)} calls"  # a message shows those that matter


def shown(num_blocks: int, calls: Iterable[tuple]) -> str:
    """The calls as a line of code that makes them again."""
    steps = [f"p = Pool({num_blocks})"]
    for call, alike in itertools.groupby(calls):
        name, *arguments = call
        step, times = f"p.{name}({', '.join(map(str, arguments))})", sum(1 for _ in alike)
        steps.append(step if times == 1 else f"[{step} for _ in range({times})]")
    return "; ".join(steps)


def with_script(pool: Callable) -> Callable:
    """A function that makes a pool of that kind, plays a script of calls on it, and returns what each gave."""
    if not callable(pool):
        return pool

    @functools.wraps(pool)
    def play(num_blocks: int, script: Script):
        made, log = pool(num_blocks), []
        for name, *arguments in script:
            try:
                given = getattr(made, name)(*arguments)
                log.append((given if name == "allocate" else None, made.num_free()))
            except NotImplementedError:
                raise
            except Exception as error:
                error.args = (f"{error}\n  after {shown(num_blocks, script.calls[: len(log) + 1])}",)
                raise
        return None if log[0] == (None, None) else log

    play.__signature__ = inspect.signature(lambda num_blocks, script: None)  # what a message calls the arguments
    return play


def compare_logs(expected: list, given: list, num_blocks: int, script: Script) -> str | None:
    """The first call that gave something else, or left another number of free blocks, and the calls so far."""
    for i, (right, found) in enumerate(zip(expected, given, strict=True)):
        so_far = shown(num_blocks, script.calls[: i + 1])
        if right[0] != found[0]:
            return f"the last allocate() should give {right[0]}, got {found[0]!r}\n  {so_far}"
        if right[1] != found[1]:
            return f"num_free() should be {right[1]}, got {found[1]!r}\n  after {so_far}"
    return None


def pool_cases(draw: Draw) -> Iterator[tuple]:
    """Used up; freed, in an order of their own too; shared; taken back while free; then long random scripts."""
    get = ("allocate",)
    yield 2, Script([get, get, get])
    yield 3, Script([get, get, ("free", [0, 1]), get, get, get])
    yield 3, Script([get, get, get, ("free", [1, 0, 2]), get, get, get])
    yield 4, Script([get, get, ("fork", [0, 1]), ("free", [0, 1]), ("free", [0]), get, get, get])
    yield 3, Script([get, get, ("free", [0, 1]), ("fork", [0]), get, get, get, ("free", [0]), get])
    yield 3, Script([get, get, ("free", [0]), ("fork", [0]), ("free", [1]), ("free", [0]), get, get, get])
    for _ in range(6):
        yield random_script(draw, draw.randrange(5, 9))


def random_script(draw: Draw, num_blocks: int) -> tuple[int, Script]:
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
    return num_blocks, Script(script)
