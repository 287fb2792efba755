"""The scheduler: which requests get how many tokens in the next step.

It knows no prefill and no decode. A request's computed tokens chase its tokens: one missing token is a decode, a
whole prompt a prefill, part of one a chunk (Agrawal et al., 2024). The batch is formed anew at every step, which is
continuous batching (Yu et al., 2022). It handles requests and blocks, never tensors.
"""

from __future__ import annotations

from collections import deque

from minillm.config import EngineConfig
from minillm.paged_cache import BlockPool, BlockTable
from minillm.prefix_cache import PrefixCache
from minillm.request import Request, Status, Step


class Scheduler:
    """Requests wait in order of arrival, run while there is memory for them, and leave when they are done."""

    def __init__(self, config: EngineConfig, max_context: int, num_blocks: int):
        if not isinstance(config, EngineConfig):
            raise ValueError(f"config must be an EngineConfig, got {config!r}")
        self.config, self.max_context = config, max_context
        self.pool = BlockPool(num_blocks, config.block_size)
        self.prefixes = PrefixCache(self.pool) if config.prefix_caching else None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.held: list[Request] = []  # done, but the static batch they are part of is not

    @property
    def num_free(self) -> int:
        """Blocks that a request can have: the free ones, and those that only the prefix cache uses."""
        return self.pool.num_free + (self.prefixes.num_evictable if self.prefixes else 0)

    @property
    def max_batch_size(self) -> int:
        """Samples at once: no more than a step has tokens."""
        return min(self.config.max_batch_size, self.config.token_budget)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that could never run, whatever else is running."""
        self.check_samples(n := 1 + len(request.samples))
        pool = self.pool
        if self.config.reserve == "max_context":
            need, why = n * pool.blocks_for(self.max_context), f"{n} reservations of {self.max_context} tokens"
        else:  # samples beyond the first can be preempted, so one must fit
            need, why = pool.blocks_for(request.max_stored), f"a request of up to {request.max_stored} stored tokens"
        if need > pool.num_blocks:
            raise ValueError(
                f"{why} needs {need} blocks of {pool.block_size} tokens, and the pool has {pool.num_blocks}: "
                "shorten the prompt, ask for fewer tokens, or raise num_blocks"
            )
        self.waiting.append(request)

    def check_samples(self, n: int) -> None:
        """Raises ValueError for more samples of one prompt than a batch holds."""
        if n > self.max_batch_size:
            raise ValueError(
                f"n={n} samples at once, but a batch holds {self.max_batch_size}: ask for fewer, or raise "
                "max_batch_size and token_budget"
            )

    def schedule(self) -> Step:
        """The next step; without requests only if there is nothing to do. Grants blocks, and preempts for them."""
        step = Step()
        for request, count in self._grants():
            if request.status is Status.RUNNING and self._make_room(request, count, step):
                step.add(request, count)
        if not step.preempted:  # memory is short: nobody new
            self._admit(step)
        return step

    def _grants(self) -> list[tuple[Request, int]]:
        """Tokens for the running requests, oldest first. Decodes come out of the budget before chunks of prompts."""
        left = self.config.token_budget - sum(request.num_missing == 1 for request in self.running)
        grants = []
        for request in self.running:
            count = 1 if request.num_missing == 1 else self._chunk(request, left)
            left -= count if request.num_missing > 1 else 0
            if count:
                grants.append((request, count))
        return grants

    def _chunk(self, request: Request, left: int) -> int:
        """Tokens of a prompt for this step, with `left` of the budget to spend; 0 if it must wait."""
        if self.config.chunked_prefill:
            return max(0, min(request.num_missing, left))
        # Whole prompts: one may exceed the budget if it would never fit, and then nothing joins it but decodes.
        longest = self.config.token_budget - self.max_batch_size
        alone = request.num_missing > longest and left >= longest
        return request.num_missing if alone or request.num_missing <= left else 0

    def _make_room(self, request: Request, count: int, step: Step) -> bool:
        """Blocks for its next `count` tokens. The newest of those not yet in the step give way, at last itself."""
        start = request.num_computed_tokens
        while request.block_table.missing(start, start + count) > self.num_free:
            holding = [done for done in self.held if done.block_table]
            if holding:  # the finished part of a static batch gives way first
                self._free(holding[-1])
                continue
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        step.copies += self._prepare(request, start, start + count)
        return True

    def _prepare(self, request: Request, start: int, stop: int) -> list[tuple[int, int]]:
        """Blocks for its tokens from `start` to `stop`, the least recently used of the prefix cache among them."""
        if self.prefixes:
            self.prefixes.evict(request.block_table.missing(start, stop) - self.pool.num_free)
        return request.block_table.prepare(start, stop)

    def _preempt(self, request: Request, step: Step) -> None:
        """Take its blocks away. It goes back to the head of the queue and will compute its tokens again."""
        self.running.remove(request)
        self._free(request)
        request.timeline.preemptions += 1
        request.timeline.recomputed_tokens += request.num_computed_tokens
        request.num_computed_tokens = request.num_received = 0
        request.status = Status.WAITING
        self.waiting.appendleft(request)
        step.preempted.append(request)

    def _admit(self, step: Step) -> None:
        """Move waiting requests into the batch, first come first served, while place, budget and blocks last."""
        static = self.config.batching == "static"
        if not self.waiting or (static and self.running):
            return
        left = self.config.token_budget - sum(step.counts)
        places = self.max_batch_size - sum(1 + len(request.samples) for request in self.running)
        promised = sum(self._growth(request) for request in self.running)
        while self.waiting:
            request = self._next()
            n = 1 + len(request.samples)
            if n > places:
                return
            self._begin(request)
            count = self._chunk(request, left)
            if self._growth(request) + promised > self.num_free or not (count or static):
                self._free(request)
                request.num_computed_tokens = 0
                return
            self._enter(request)
            start, reserves = request.num_computed_tokens, self.config.reserve == "max_context"
            self._prepare(request, start, self.max_context if reserves else start + count)
            if count:
                step.add(request, count)
            left, places = left - count, places - n
            promised += self._growth(request)

    def _next(self) -> Request:
        """The waiting request whose turn it is."""
        if self.config.order == "arrival" or not self.prefixes:
            return self.waiting[0]
        overdue = [request for request in self.waiting if request.overtaken >= self.max_batch_size]
        return overdue[0] if overdue else max(self.waiting, key=lambda r: self.prefixes.peek(r.token_ids[:-1]))

    def _begin(self, request: Request) -> None:
        """Give a waiting request a block table, which starts with what the prefix cache has of its tokens.

        The last token is left out: it must be computed, for the next one is drawn from it.
        """
        request.block_table = BlockTable(self.pool)
        request.prefix = self.prefixes.root if self.prefixes else None
        if request.num_received:  # computed elsewhere: the runner will put them into these blocks
            request.num_computed_tokens = request.num_received
        elif self.prefixes:
            request.prefix, cached = self.prefixes.match(request.token_ids[:-1])
            self.prefixes.lock(request.prefix)
            request.block_table.blocks = self.pool.fork(cached)
            request.num_computed_tokens = len(cached) * self.pool.block_size

    def _enter(self, request: Request) -> None:
        """Move a waiting request into the batch. What a preempted one finds again is not counted as cached."""
        for earlier in self.waiting:
            if earlier is request:
                break
            earlier.overtaken += 1
        self.waiting.remove(request)
        self.running.append(request)
        request.status, found = Status.RUNNING, request.num_computed_tokens
        if request.timeline.preemptions:
            request.timeline.recomputed_tokens -= min(found, request.timeline.recomputed_tokens)
        elif not request.num_received:
            request.timeline.cached_tokens = found

    def advance(self, request: Request, count: int) -> None:
        """Its next `count` tokens are computed; whole blocks of a prompt can be found by others from now on."""
        request.num_computed_tokens += count
        if self.prefixes and (count > 1 or request.num_computed_tokens == request.num_prompt_tokens):
            self._remember(request)

    def _remember(self, request: Request) -> None:
        """Put its whole, computed blocks into the prefix cache. If an equal start came first, that serves both."""
        table, size = request.block_table, self.pool.block_size
        if request.received is not None:
            return  # its keys and values have not reached their blocks yet
        whole = min(request.num_computed_tokens // size, len(table.blocks))
        tokens, mine = request.token_ids[: whole * size], table.blocks[:whole]
        node, kept = self.prefixes.insert(tokens, mine)
        self.prefixes.lock(node)
        self.prefixes.unlock(request.prefix)
        request.prefix = node
        if kept != mine:  # to keep both would take twice the room, and more than was asked for at the door
            table.blocks[:whole] = self.pool.fork(kept)
            self.pool.free(mine)

    def _growth(self, request: Request) -> int:
        """Blocks that must be free for a request to compute its known tokens and store one more, or all it reserves."""
        whole, reserves = self.pool.blocks_for(self.max_context), self.config.reserve == "max_context"
        stop = self.max_context if reserves else min(request.num_tokens + 1, request.max_stored)
        table, following = request.block_table, request.num_computed_tokens + 1
        need = table.missing(following - 1, following)
        need += max(0, self.pool.blocks_for(stop) - max(len(table.blocks), self.pool.blocks_for(following)))
        return need + (whole * len(request.samples) if reserves else 0)

    def fork(self, request: Request) -> None:
        """Its prompt is computed: its other samples begin to run on the same blocks."""
        place = self.running.index(request) + 1
        for sample in request.samples:
            sample.block_table, sample.status = request.block_table.fork(), Status.RUNNING
            if self.prefixes:
                sample.prefix = request.prefix
                self.prefixes.lock(sample.prefix)
            sample.num_computed_tokens = request.num_computed_tokens
            sample.timeline.scheduled = request.timeline.scheduled
            if self.config.reserve == "max_context":  # the prompt is shared, the rest of each reservation its own
                sample.block_table.truncate(request.num_computed_tokens)
                own = len(sample.block_table.blocks) * self.pool.block_size
                self._prepare(sample, own, max(own, self.max_context))
        self.running[place:place] = request.samples
        request.samples = []

    def finish(self, request: Request, reason: str) -> list[Request]:
        """End a request, running or waiting; returns those that leave now.

        In continuous batching that is the request itself. A static batch keeps its places and its memory until the
        last of it is done, and then all leave.
        """
        if request.status is Status.FINISHED:
            raise ValueError(f"{request!r} has finished already")
        was_running = request.status is Status.RUNNING
        (self.running if was_running else self.waiting).remove(request)
        request.status, request.finish_reason = Status.FINISHED, reason
        if not was_running:
            return [request]
        if self.config.batching == "continuous":
            self._free(request)
            return [request]
        self.held.append(request)
        if self.running:
            return []
        leaving, self.held = self.held, []
        for done in leaving:
            if done.block_table:
                self._free(done)
        return leaving

    def _free(self, request: Request) -> None:
        """Take its blocks away. Whole, computed ones stay in the prefix cache, as long as there is room."""
        if self.prefixes:
            self._remember(request)
            self.prefixes.unlock(request.prefix)
        self.pool.free(request.block_table.blocks)
        request.block_table = None

    @property
    def used_blocks(self) -> int:
        """Blocks that are in use."""
        return self.pool.num_blocks - self.pool.num_free

    @property
    def stored_tokens(self) -> int:
        """Keys and values in the cache, each shared one counted once."""
        size, filled = self.pool.block_size, {}
        for request in [*self.running, *self.held]:
            for place, block in enumerate(request.block_table.blocks if request.block_table else ()):
                tokens = min(size, max(0, request.num_computed_tokens - place * size))
                filled[block] = max(tokens, filled.get(block, 0))
        return sum(filled.values())

    def check(self) -> None:
        """Raises AssertionError unless every block is accounted for and every request is where its status says."""
        alive = [*self.running, *self.held]
        tables = [request.block_table for request in alive if request.block_table]
        self.pool.check([*tables, *(self.prefixes.nodes() if self.prefixes else ())])
        if self.prefixes:
            self.prefixes.check()
        places = sum(1 + len(request.samples) for request in self.running)
        assert places <= self.max_batch_size, f"{places} samples run in a batch of {self.max_batch_size}"
        assert len({id(r) for r in [*alive, *self.waiting]}) == len(alive) + len(self.waiting), "a request is in twice"
        for request in self.running:
            room = len(request.block_table.blocks) * self.pool.block_size
            assert request.status is Status.RUNNING and request.num_missing > 0, f"{request!r} has nothing to compute"
            assert request.num_computed_tokens <= room, f"{request!r} has room for {room}"
        for request in self.waiting:
            assert request.status is Status.WAITING and request.num_computed_tokens == 0
            assert request.block_table is None, f"{request!r} waits and has a block table"
