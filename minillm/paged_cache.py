"""The paged cache: keys and values in small blocks, handed out as sequences grow (Kwon et al., 2023).

A contiguous cache reserves room for the longest a sequence may become. Here memory is cut into blocks of
`block_size` tokens. `BlockPool` counts who uses which block, a `BlockTable` lists the blocks of one sequence in
order, and `PagedCache` holds the tensors. Sequences that start alike may share blocks; whoever writes into a shared
block first gets a copy of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from minillm.config import ModelConfig
from minillm.kv_cache import chunk_attention


class OutOfBlocks(RuntimeError):
    """The pool has no free block left. A scheduler asks `BlockPool.num_free` first, and preempts."""


class BlockPool:
    """Which of `num_blocks` blocks are free, and how many tables use each of the others. All in constant time."""

    def __init__(self, num_blocks: int, block_size: int):
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._ref_counts = [0] * num_blocks
        # The block freed last is used first, so that the blocks in use stay close together at the pool's start.
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self) -> int:
        """A free block, now used once. Raises OutOfBlocks if there is none."""
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} blocks of {self.block_size} tokens are in use")
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block

    def fork(self, blocks: Sequence[int]) -> list[int]:
        """The same blocks for one more user. Raises ValueError for a block that is free."""
        for block in blocks:
            if self.ref_count(block) < 1:
                raise ValueError(f"block {block} is free: only blocks in use can be shared")
        for block in blocks:
            self._ref_counts[block] += 1
        return list(blocks)

    def free(self, blocks: Iterable[int]) -> None:
        """One user less for each block; a block without users is free. Raises ValueError for one that is free already.

        The last block goes first: where all of a sequence is freed, its start is reused first.
        """
        blocks = list(blocks)
        for block, times in Counter(blocks).items():
            if self.ref_count(block) < times:
                raise ValueError(f"block {block} is free already")
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._free.append(block)

    def ref_count(self, block: int) -> int:
        """How many tables use the block. Raises ValueError for a number that is no block of this pool."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"there is no block {block!r}: this pool has blocks 0 to {self.num_blocks - 1}")
        return self._ref_counts[block]

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raises AssertionError unless the counts are exactly those of `tables`, and all other blocks are free."""
        used = Counter(block for table in tables for block in table.blocks)
        for block, count in enumerate(self._ref_counts):
            assert count == used[block], f"block {block} is counted {count} times and used {used[block]} times"
        assert len(self._free) == len(set(self._free)), "a block is in the free list twice"
        assert set(self._free) == set(range(self.num_blocks)) - set(used), "a block is lost, or free and in use"


class BlockTable:
    """The blocks of one sequence, in order: token t lies in block t // block_size, at place t % block_size."""

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.blocks: list[int] = []

    def missing(self, start: int, stop: int) -> int:
        """Free blocks that `prepare(start, stop)` would take."""
        return max(0, self.pool.blocks_for(stop) - len(self.blocks)) + len(self._shared(start, stop))

    def prepare(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Make tokens `start` to `stop - 1` writable: own blocks, as many as they need.

        The rule for growth, in words: there is room for len(blocks) * block_size tokens. So the table grows by a block
        exactly when a token is about to be written whose position is that number. A prompt of one whole block needs its
        second block not when it is computed, but when the first new token is stored.

        Returns the (source, target) pairs of blocks of this table that must be copied before anything is written
        (copy-on-write): those that another table uses too. Raises OutOfBlocks, and then nothing has changed.
        """
        missing = self.missing(start, stop)
        if missing > self.pool.num_free:
            raise OutOfBlocks(
                f"tokens {start} to {stop - 1} need {missing} more blocks of {self.pool.block_size} tokens; "
                f"{self.pool.num_free} of {self.pool.num_blocks} are free"
            )
        copies = []
        for index in self._shared(start, stop):
            source, self.blocks[index] = self.blocks[index], self.pool.allocate()
            copies.append((source, self.blocks[index]))
            self.pool.free([source])
        while len(self.blocks) * self.pool.block_size < stop:
            self.blocks.append(self.pool.allocate())
        return copies

    def fork(self) -> BlockTable:
        """A table that shares every block of this one."""
        table = BlockTable(self.pool)
        table.blocks = self.pool.fork(self.blocks)
        return table

    def truncate(self, num_tokens: int) -> None:
        """Give back the blocks behind the first `num_tokens` tokens."""
        keep = self.pool.blocks_for(num_tokens)
        self.pool.free(self.blocks[keep:])
        del self.blocks[keep:]

    def slots(self, start: int, stop: int) -> list[int]:
        """Where tokens `start` to `stop - 1` lie: block * block_size + place, the slot mapping."""
        size = self.pool.block_size
        return [self.blocks[t // size] * size + t % size for t in range(start, stop)]

    def _shared(self, start: int, stop: int) -> list[int]:
        """Places in the table of the blocks that tokens `start` to `stop - 1` write into and others use too."""
        last = min(self.pool.blocks_for(stop), len(self.blocks))
        return [i for i in range(start // self.pool.block_size, last) if self.pool.ref_count(self.blocks[i]) > 1]


class PagedCache:
    """Keys and values of all blocks: `k` and `v` are [n_layers, num_blocks, n_kv_heads, block_size, head_dim]."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int = 16, device=None, dtype=None):
        BlockPool(num_blocks, block_size)  # the same limits, the same errors
        shape = (config.n_layers, num_blocks, config.n_kv_heads, block_size, config.head_dim)
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.block_size = block_size

    def view(self, tables: Sequence[BlockTable], starts: Sequence[int], counts: Sequence[int]) -> PagedView:
        """The cache as one forward pass sees it.

        The flat run holds counts[i] tokens of the sequence of tables[i], from position starts[i] on; what is before
        them is stored already. Raises ValueError for a table that has no room for them.
        """
        for i, (table, start, count) in enumerate(zip(tables, starts, counts, strict=True)):
            room = len(table.blocks) * self.block_size
            if count < 1 or start < 0 or start + count > room:
                raise ValueError(
                    f"sequence {i} wants tokens {start} to {start + count - 1}; its table has room for {room}"
                )
        return PagedView(self, tables, starts, counts)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in every layer: the second half of a copy-on-write."""
        pairs = list(pairs)
        if pairs:
            source, target = torch.tensor(pairs, device=self.k.device).unbind(1)
            self.k[:, target], self.v[:, target] = self.k[:, source], self.v[:, source]

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, used or not."""
        return self.k.nbytes + self.v.nbytes


class PagedView:
    """One step over a `PagedCache`: any mix of sequences and token counts.

    Two kinds of work. A chunk of several tokens gathers its keys and values once and attends as usual: the copy is
    small beside the products. Single tokens are too cheap for a copy of their whole context, so they are
    attended where the blocks lie: see `DecodePlan`.
    """

    def __init__(self, cache: PagedCache, tables: Sequence[BlockTable], starts: Sequence[int], counts: Sequence[int]):
        self.cache, device, size = cache, cache.k.device, cache.block_size
        slots, fresh, self.chunks, rows, decoding, offset = [], [], [], [], [], 0
        for table, start, count in zip(tables, starts, counts, strict=True):
            new = table.slots(start, start + count)
            slots += new
            fresh += [slot // size for slot in new if slot % size == 0]
            if count == 1:
                rows.append(offset)
                decoding.append((table.blocks[: start // size + 1], start + 1))
            else:
                blocks = torch.tensor(table.blocks[: -(-(start + count) // size)], device=device)
                self.chunks.append((slice(offset, offset + count), start, start + count, blocks))
            offset += count
        self.num_tokens = offset
        slots = torch.tensor(slots, dtype=torch.long, device=device)
        self.blocks, self.places = slots // size, slots % size
        self.fresh = torch.tensor(fresh, device=device) if fresh else None
        self.rows = None if len(rows) == offset else torch.tensor(rows, device=device)
        self.plan = DecodePlan(decoding, size, device) if decoding else None

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v [T, n_kv_heads, D] in their slots, then attend; q [T, n_heads, D] -> the same shape."""
        if q.shape[0] != self.num_tokens:
            raise ValueError(f"this view is of a step of {self.num_tokens} tokens, the run has {q.shape[0]}")
        keys, values = self.cache.k[layer], self.cache.v[layer]
        if not k.shape == v.shape == (self.num_tokens, keys.shape[1], keys.shape[3]):
            expected = [self.num_tokens, keys.shape[1], keys.shape[3]]
            raise ValueError(f"k and v must be {expected}, got {list(k.shape)} and {list(v.shape)}")
        if self.fresh is not None:
            values[self.fresh] = 0  # a place not yet written has weight 0 below, and 0 times NaN would be NaN
        keys[self.blocks, :, self.places], values[self.blocks, :, self.places] = k, v
        if self.plan is not None and not self.chunks:
            return self.plan.attend(q, keys, values)
        out = torch.empty_like(q)
        if self.plan is not None:
            out[self.rows] = self.plan.attend(q[self.rows], keys, values)
        for run, start, end, blocks in self.chunks:
            if start == 0:  # a whole prompt: its keys and values are at hand
                seen_k, seen_v = k[run].transpose(0, 1), v[run].transpose(0, 1)
            else:
                seen_k, seen_v = (x[blocks].transpose(0, 1).flatten(1, 2)[:, :end] for x in (keys, values))
            out[run] = chunk_attention(q[run].transpose(0, 1)[None], seen_k[None], seen_v[None])[0].transpose(0, 1)
        return out


class DecodePlan:
    """Attention of single tokens, block by block, without gathering the blocks of a sequence into one piece.

    Every block is read once and multiplied with the queries of all who share it; only the scores, which are small,
    are brought into the order of the sequences for the softmax, and taken back to weigh the values.
    Splitting the context this way is what GPU kernels for decoding do (Dao et al., 2023, Flash-Decoding; chapter 11).
    """

    def __init__(self, sequences: list[tuple[list[int], int]], block_size: int, device: torch.device):
        """`sequences`: for each query its blocks, and how many tokens it sees."""
        batch, longest = len(sequences), max(len(table) for table, _ in sequences)
        wanted: dict[int, list[int]] = {}  # block: where its scores belong, query * longest + place in the table
        for row, (table, _) in enumerate(sequences):
            for spot, block in enumerate(table, row * longest):
                wanted.setdefault(block, []).append(spot)
        nobody, order, made = batch * longest, [0] * (batch * longest + 1), 0
        self.groups = []  # one product for all blocks with equally many users: blocks, queries, weights, owners
        for users in sorted({len(spots) for spots in wanted.values()}):
            blocks = [block for block, spots in wanted.items() if len(spots) == users]
            first, end = min(blocks), max(blocks) + 1
            if 2 * len(blocks) > end - first:  # one stretch of the pool is read in place, with what else lies in it
                which, blocks = slice(first, end), range(first, end)
            else:  # that would read too much: the blocks are copied together
                which = torch.tensor(blocks, device=device)
            spots = [wanted[b] if len(wanted.get(b, ())) == users else [nobody] * users for b in blocks]
            for spot in (spot for some in spots for spot in some):
                order[spot], made = made, made + 1
            spots = torch.tensor(spots, device=device)  # [blocks, users]
            owners = spots // longest  # of a foreign block one beyond the last
            self.groups.append((which, owners.clamp(max=batch - 1), spots.clamp(max=nobody - 1), owners.flatten()))
        self.order = torch.tensor(order[:nobody], device=device)
        lengths = torch.tensor([length for _, length in sequences], device=device)
        self.hidden = (
            torch.arange(longest * block_size, device=device) >= lengths[:, None, None]
        )  # [B, 1, longest * size]

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q [B, n_heads, D], keys and values [num_blocks, n_kv_heads, block_size, D] -> [B, n_heads, D]."""
        (batch, heads, dim), (_, kv_heads, size, _) = q.shape, keys.shape

        def product(rows, blocks):  # [blocks, users, heads, X], [blocks, kv, X, Y] -> [blocks * users, heads, Y]
            rows = rows.view(len(blocks), -1, kv_heads, heads // kv_heads, rows.shape[-1]).transpose(1, 2)
            found = rows.reshape(len(blocks), kv_heads, -1, rows.shape[-1]) @ blocks  # [blocks, kv, users * group, Y]
            return found.view(*rows.shape[:4], -1).transpose(1, 2).reshape(-1, heads, blocks.shape[-1])

        scaled = q * dim**-0.5
        scores = [product(scaled[queries], keys[which].transpose(-1, -2)) for which, queries, _, _ in self.groups]
        scores = torch.cat(scores)[self.order].view(batch, -1, heads, size)
        scores = scores.transpose(1, 2).reshape(batch, heads, -1)  # [B, heads, longest * size]
        weights = scores.masked_fill_(self.hidden, -torch.inf).softmax(-1)
        weights = weights.view(batch, heads, -1, size).transpose(1, 2).reshape(-1, heads, size)
        out = q.new_zeros(batch + 1, heads, dim)  # the last row is nobody's
        for which, _, spots, owners in self.groups:
            out.index_add_(0, owners, product(weights[spots], values[which]))
        return out[:batch]
