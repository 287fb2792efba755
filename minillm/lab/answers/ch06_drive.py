"""The check of chapter 6's scheduler: jobs that arrive at random, and rules that every step must keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from minillm.lab import checks
from minillm.lab.checks import Draw
from minillm.paged_cache import BlockPool


@dataclass(eq=False)
class Job:
    """What the scheduler of the exercise sees: `tokens` known so far, and the `blocks` it holds."""

    number: int
    tokens: int
    blocks: list[int] = field(default_factory=list)


class WatchedPool(BlockPool):
    """A pool that remembers the blocks that were given back."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.given_back: set[int] = set()

    def free(self, blocks: Iterable[int]) -> None:
        """As in `BlockPool`."""
        blocks = list(blocks)
        super().free(blocks)
        self.given_back |= set(blocks)


def schedule_cases(draw: Draw) -> Iterator[tuple]:
    """(blocks, block size, batch size, jobs): each job is (step of arrival, prompt, tokens to make). All fit alone."""
    yield 4, 4, 2, [(0, 3, 2)]
    yield 2, 4, 2, [(0, 4, 3), (0, 1, 2)]
    yield 2, 4, 2, [(0, 4, 3), (1, 1, 2)]  # the newcomer must not take what the other one needs
    yield 2, 4, 1, [(0, 8, 1)]  # all blocks for one
    yield 9, 1, 3, [(0, 2, 6), (0, 2, 6), (1, 2, 6)]
    yield 40, 2, 3, [(0, 3, 9), (0, 2, 2), (1, 4, 3), (1, 2, 5)]
    for _ in range(25):
        size = draw.choice([1, 2, 3, 4])
        jobs = [(draw.randrange(12), draw.randrange(1, 9), draw.randrange(1, 12)) for _ in range(draw.randrange(2, 9))]
        largest = max(-(-(prompt + new - 1) // size) for _, prompt, new in jobs)
        yield largest + draw.randrange(2 * largest), size, draw.randrange(1, 5), sorted(jobs)


def drive(answer: Callable, num_blocks: int, block_size: int, batch_size: int, jobs: Sequence[tuple]) -> str | None:
    """Run the jobs to their end; what went wrong first, "" if nothing did, None if there is no answer."""
    pool, waiting, running = WatchedPool(num_blocks, block_size), [], []
    alive: dict[int, tuple[Job, int]] = {}  # number: (the job, its tokens at the end)
    bound = 20 + sum(arrival + prompt + 2 * new for arrival, prompt, new in jobs) * (len(jobs) + 1)
    for step in range(bound):
        for number, (arrival, prompt, new) in enumerate(jobs):
            if arrival == step:
                waiting.append(Job(number, prompt))
                alive[number] = (waiting[-1], prompt + new)
        if not waiting and not running:
            if step >= max(arrival for arrival, _, _ in jobs):
                return ""
            continue
        before, pool.given_back = {job: list(job.blocks) for job in running}, set()
        granted = answer(waiting, running, pool, batch_size)
        if granted is None or granted is ...:
            return None
        wrong = broken(granted, before, waiting, running, pool, batch_size, [job for job, _ in alive.values()])
        if wrong:
            return f"step {step + 1}: {wrong}"
        for job in list(granted):
            job.tokens += 1
            if job.tokens == alive[job.number][1]:
                running.remove(job)
                pool.free(job.blocks)
                del alive[job.number]
    return f"after {bound} steps jobs {sorted(alive)} are still not done"


def broken(granted, before, waiting, running, pool: WatchedPool, batch_size: int, alive: Sequence[Job]) -> str:
    """The first rule that a step breaks, in words; "" if it keeps them all."""
    if not isinstance(granted, (list, tuple)):
        return f"the jobs of the step should be a list, got {checks.describe(granted)}"
    for name, items in (("the list of the step", granted), ("waiting", waiting), ("running", running)):
        if strange := [item for item in items if not isinstance(item, Job)]:
            return f"{name} should hold the jobs themselves, got {checks.describe(strange[0])}"
    if strange := [job for job in alive if not isinstance(job.blocks, list)]:
        return f"the blocks of job {strange[0].number} should be a list, got {checks.describe(strange[0].blocks)}"
    numbers = {name: [job.number for job in jobs] for name, jobs in (("w", waiting), ("r", running), ("g", granted))}
    everybody, expected = sorted(numbers["w"] + numbers["r"]), sorted(job.number for job in alive)
    if lost := set(expected) - set(everybody):
        return f"job {min(lost)} is lost: neither in waiting nor in running"
    if everybody != expected:
        return f"waiting {numbers['w']} and running {numbers['r']} should hold jobs {expected}, each once"
    if len(running) > batch_size:
        return f"{len(running)} jobs run in a batch of {batch_size}"
    if sorted(numbers["g"]) != sorted(numbers["r"]):
        return f"the step has jobs {numbers['g']}; running are {numbers['r']}, and all of them should get on"
    if holder := next((job for job in waiting if job.blocks), None):
        return f"job {holder.number} waits and still holds {len(holder.blocks)} blocks"
    held = [block for job in alive for block in job.blocks]
    if len(set(held)) < len(held):
        return "two jobs hold the same block"
    if len(held) + pool.num_free != pool.num_blocks or any(pool.ref_count(block) != 1 for block in held):
        count = f"{len(held)} blocks are held and {pool.num_free} free, of {pool.num_blocks}"
        return f"{count}: some leaked, or are free and held"
    for job in running:
        if len(job.blocks) < pool.blocks_for(job.tokens):
            need = pool.blocks_for(job.tokens)
            return f"job {job.number} has {job.tokens} tokens and {len(job.blocks)} blocks; it needs {need}"
    return unfair(before, waiting, running, pool, batch_size)


def unfair(before, waiting, running, pool: WatchedPool, batch_size: int) -> str:
    """What is wrong with the order, or wasted; "" if nothing is."""
    for job in before:
        if job in running and pool.given_back & set(before[job]):
            return f"job {job.number} was preempted and joined again in the same step: it could have stayed"
        if job in running and job.blocks[: len(before[job])] != before[job]:
            return f"job {job.number} runs on and should keep its blocks {before[job]}, in order; it has {job.blocks}"
    order = [job.number for job in (*sorted(running, key=lambda job: job.number), *waiting)]
    if order != sorted(order):
        return (
            f"job {min(job.number for job in waiting)} is older than one that runs, or than one before it in the queue"
        )
    preempted = [job for job in before if job in waiting]
    if (preempted or pool.given_back) and sum(pool.blocks_for(job.tokens) for job in before) <= pool.num_blocks:
        return "a job was preempted, though there were blocks enough for all who ran"
    need = 0
    for job in sorted(before, key=lambda job: job.number):
        need += pool.blocks_for(job.tokens)
        if job in preempted and need <= pool.num_blocks:
            return f"job {job.number} was preempted, though there were blocks enough for it and all who are older"
    spare = pool.num_free - len(running) - 1  # whoever keeps a block for everybody's next token is right as well
    spare = spare if running else pool.num_free
    if waiting and not preempted and len(running) < batch_size and pool.blocks_for(waiting[0].tokens) <= spare:
        return f"job {waiting[0].number} could have joined: there are a place and {pool.num_free} free blocks"
    return ""
