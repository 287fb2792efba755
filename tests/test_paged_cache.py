"""The paged cache: the pool's books, growth block by block, copy-on-write, and attention over scattered blocks.

References that are not ours: a dictionary of counts for the pool, a list of tokens for each table, and PyTorch's own
attention in float64 over each request's keys and values, kept in one piece.
"""

import json
import random
from collections import Counter, deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.nn import functional as F

from minillm.config import EngineConfig, ModelConfig
from minillm.engine import Engine
from minillm.kv_cache import ContiguousCache
from minillm.lab import notebooks
from minillm.model import Transformer
from minillm.naive import NoCache
from minillm.paged_cache import BlockPool, BlockTable, OutOfBlocks, PagedCache
from minillm.runner import ModelRunner
from minillm.sampling import SamplingParams

CONFIG = ModelConfig(
    vocab_size=61, dim=24, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=10, ffn_dim=40, max_context=64,
    tie_embeddings=False,
)  # fmt: skip
BLOCK_SIZES = [1, 3, 16]


# The pool.


class PoolAgainstDictionary(RuleBasedStateMachine):
    """E1: the pool against a dictionary of block -> users, and `check` after every call."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(7, 3)
        self.held: list[list[int]] = []  # what each user holds

    def counts(self) -> dict[int, int]:
        return {b: sum(b in blocks for blocks in self.held) for b in range(7)}

    @rule()
    def allocate(self):
        free = [b for b, count in self.counts().items() if not count]
        if free:
            block = self.pool.allocate()
            assert block in free
            self.held.append([block])
        else:
            with pytest.raises(OutOfBlocks, match="all 7 blocks of 3 tokens are in use"):
                self.pool.allocate()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def extend(self, data):
        """A user takes one block more, as a table does."""
        if self.pool.num_free:
            data.draw(st.sampled_from(self.held)).append(self.pool.allocate())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data):
        blocks = data.draw(st.sampled_from(self.held))
        copy = self.pool.fork(blocks)
        assert copy == blocks and copy is not blocks
        self.held.append(copy)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(block=st.integers(0, 6))
    def misuse(self, block):
        if not self.counts()[block]:
            with pytest.raises(ValueError, match=f"block {block} is free already"):
                self.pool.free([block])
            with pytest.raises(ValueError, match=f"block {block} is free: only blocks in use can be shared"):
                self.pool.fork([block])

    @invariant()
    def books_balance(self):
        counts = self.counts()
        assert self.pool.num_free == sum(not count for count in counts.values())
        assert [self.pool.ref_count(b) for b in range(7)] == list(counts.values())
        self.pool.check([SimpleNamespace(blocks=blocks) for blocks in self.held])


PoolAgainstDictionary.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestPool = PoolAgainstDictionary.TestCase


def plant(fault: str) -> tuple[BlockPool, list[BlockTable]]:
    """A pool in use by two tables, with one fault in its books."""
    pool = BlockPool(8, 2)
    table = BlockTable(pool)
    table.prepare(0, 5)
    tables = [table, table.fork()]
    match fault:
        case "a table freed twice":
            pool.free(table.blocks)
        case "a table forgotten":
            tables.pop()
        case "freed while a table still points there":
            pool.free(table.blocks[-1:]), pool.free(table.blocks[-1:])
        case "free and in use":
            pool._free.append(table.blocks[0])
        case "free twice":
            pool._free.append(pool._free[0])
        case "a block lost":
            pool._free.pop()
        case "a block shared in secret":
            tables.append(BlockTable(pool))
            tables[-1].blocks = list(table.blocks)
    return pool, tables


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("a table freed twice", "counted 1 times and used 2 times"),
        ("a table forgotten", "counted 2 times and used 1 times"),
        ("freed while a table still points there", "counted 0 times and used 2 times"),
        ("free and in use", "lost, or free and in use"),
        ("free twice", "in the free list twice"),
        ("a block lost", "lost, or free and in use"),
        ("a block shared in secret", "counted 2 times and used 3 times"),
    ],
)
def test_check_finds_a_planted_fault(fault, message):
    """E1 and the spirit of E2: an integrity check that cannot fail is none."""
    with pytest.raises(AssertionError, match=message):
        pool, tables = plant(fault)
        pool.check(tables)
    pool, tables = plant("nothing")
    pool.check(tables)


# Tables.


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_a_block_is_added_exactly_when_a_token_is_written_that_has_no_room(size, beside):
    """E4: prompts of block_size - 1, block_size and block_size + 1, then token by token over two more blocks."""
    prompt = size + beside
    pool = BlockPool(8, size)
    table = BlockTable(pool)
    if prompt:
        table.prepare(0, prompt)
        assert len(table.blocks) == (1 if beside <= 0 else 2)
    for position in range(prompt, prompt + 2 * size + 1):
        before = list(table.blocks)
        assert table.missing(position, position + 1) == (position == len(before) * size)
        assert table.prepare(position, position + 1) == []
        assert table.blocks[: len(before)] == before, "blocks once given stay where they are"
        assert (len(table.blocks) > len(before)) == (position % size == 0)
        assert len(table.blocks) == position // size + 1
        pool.check([table])


def test_a_whole_block_of_prompt_needs_no_second_block_until_a_token_is_stored():
    """E4 in one picture: 16 tokens, blocks of 16."""
    table = BlockTable(BlockPool(4, 16))
    table.prepare(0, 16)
    assert len(table.blocks) == 1
    table.prepare(16, 17)
    assert len(table.blocks) == 2


def test_what_does_not_fit_changes_nothing():
    """The refusal names what is missing; the table and the pool are as before, shared blocks included."""
    pool = BlockPool(4, 2)
    table = BlockTable(pool)
    table.prepare(0, 5)
    other = table.fork()
    before = list(table.blocks)
    with pytest.raises(OutOfBlocks, match="tokens 5 to 8 need 3 more blocks of 2 tokens; 1 of 4 are free"):
        table.prepare(5, 9)  # two new blocks, and a copy of the shared third
    assert table.blocks == before == other.blocks and pool.num_free == 1
    pool.check([table, other])


def test_truncate_gives_back_whole_blocks_and_keeps_the_one_in_use():
    pool = BlockPool(9, 4)
    table = BlockTable(pool)
    table.prepare(0, 14)
    for keep, blocks in ((13, 4), (12, 3), (9, 3), (8, 2), (1, 1), (0, 0)):
        table.truncate(keep)
        assert len(table.blocks) == blocks and pool.num_free == 9 - blocks
        pool.check([table])


def test_slots_follow_the_table_wherever_its_blocks_lie():
    """Slot = block * block_size + place, with a table whose blocks are in no order."""
    table = BlockTable(BlockPool(9, 3))
    table.blocks = [7, 2, 5]
    assert table.slots(0, 9) == [21, 22, 23, 6, 7, 8, 15, 16, 17]
    assert table.slots(2, 4) == [23, 6]
    assert table.slots(4, 4) == []


def fresh_rows(cache: PagedCache, count: int):
    """Keys and values of `count` new tokens in every layer, all different."""
    shape = (cache.k.shape[0], count, cache.k.shape[2], cache.k.shape[4])
    return torch.randn(shape, dtype=cache.k.dtype), torch.randn(shape, dtype=cache.k.dtype)


def stored(cache: PagedCache, table: BlockTable, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [layers, count, n_kv_heads, head_dim] of a table's first tokens, read slot by slot."""
    size = cache.block_size
    places = [divmod(slot, size) for slot in table.slots(0, count)]
    return tuple(torch.stack([x[:, block, :, place] for block, place in places], 1) for x in (cache.k, cache.v))


class TablesAgainstLists(RuleBasedStateMachine):
    """Copy-on-write: whatever tables share, each of them reads back what was written through it, and nothing else."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.size = 3
        self.pool = BlockPool(14, self.size)
        self.cache = poisoned(14, self.size)
        self.tables: list[BlockTable] = [BlockTable(self.pool)]
        self.keys = [torch.empty(CONFIG.n_layers, 0, CONFIG.n_kv_heads, CONFIG.head_dim).double()]
        self.values = [self.keys[0].clone()]

    @rule(data=st.data(), count=st.integers(1, 7))
    def write(self, data, count):
        i = data.draw(st.integers(0, len(self.tables) - 1))
        table, start = self.tables[i], self.keys[i].shape[1]
        missing, free = table.missing(start, start + count), self.pool.num_free
        if missing > free:
            with pytest.raises(OutOfBlocks):
                table.prepare(start, start + count)
            return
        copies = table.prepare(start, start + count)
        assert self.pool.num_free == free - missing, "missing() says exactly what prepare() takes"
        assert len(copies) <= 1, "only the block that is filled in part can be shared and written"
        self.cache.copy(copies)
        k, v = fresh_rows(self.cache, count)
        view = self.cache.view([table], [start], [count])
        for layer in range(CONFIG.n_layers):
            view.attend(layer, torch.zeros(count, CONFIG.n_heads, CONFIG.head_dim).double(), k[layer], v[layer])
        self.keys[i] = torch.cat([self.keys[i], k], 1)
        self.values[i] = torch.cat([self.values[i], v], 1)

    @precondition(lambda self: len(self.tables) < 5)
    @rule(data=st.data())
    def fork(self, data):
        i = data.draw(st.integers(0, len(self.tables) - 1))
        free = self.pool.num_free
        self.tables.append(self.tables[i].fork())
        assert self.tables[-1].blocks == self.tables[i].blocks and self.pool.num_free == free, "a fork takes no block"
        self.keys.append(self.keys[i]), self.values.append(self.values[i])

    @rule(data=st.data())
    def truncate(self, data):
        i = data.draw(st.integers(0, len(self.tables) - 1))
        keep = data.draw(st.integers(0, self.keys[i].shape[1]))
        self.tables[i].truncate(keep)
        self.keys[i], self.values[i] = self.keys[i][:, :keep], self.values[i][:, :keep]

    @invariant()
    def each_reads_its_own(self):
        self.pool.check(self.tables)
        for table, keys, values in zip(self.tables, self.keys, self.values, strict=True):
            assert len(table.blocks) == self.pool.blocks_for(keys.shape[1])
            if keys.shape[1]:
                found = stored(self.cache, table, keys.shape[1])
                assert torch.equal(found[0], keys) and torch.equal(found[1], values)


def poisoned(num_blocks: int, size: int) -> PagedCache:
    """A cache whose unwritten slots are not numbers, so that reading one shows (E5)."""
    cache = PagedCache(CONFIG, num_blocks, size, dtype=torch.float64)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


TablesAgainstLists.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestTables = TablesAgainstLists.TestCase


def test_a_fork_shares_full_blocks_for_good_and_copies_the_partial_one_once():
    """Two samples of a prompt of 10 tokens in blocks of 4: the first to write copies, the last one keeps the old."""
    pool = BlockPool(9, 4)
    first = BlockTable(pool)
    first.prepare(0, 10)
    second = first.fork()
    old = first.blocks[2]
    copies = first.prepare(10, 11)
    assert copies == [(old, first.blocks[2])] and first.blocks[2] != old
    assert second.prepare(10, 11) == [] and second.blocks[2] == old, "the last user of a block writes in place"
    assert first.blocks[:2] == second.blocks[:2] and [pool.ref_count(b) for b in first.blocks] == [2, 2, 1]
    assert pool.num_free == 9 - 4
    pool.check([first, second])


def test_a_fork_at_a_block_boundary_copies_nothing():
    pool = BlockPool(9, 4)
    first = BlockTable(pool)
    first.prepare(0, 8)
    second = first.fork()
    assert first.prepare(8, 9) == [] == second.prepare(8, 9)
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]


def test_copies_of_one_step_happen_at_once():
    """A block that is copied from and to in one step is read before it is overwritten."""
    cache = PagedCache(CONFIG, 4, 3, dtype=torch.float64)
    cache.k.normal_(), cache.v.normal_()
    k, v = cache.k.clone(), cache.v.clone()
    cache.copy([(0, 2), (2, 3)])
    for now, before in ((cache.k, k), (cache.v, v)):
        assert torch.equal(now[:, 2], before[:, 0]) and torch.equal(now[:, 3], before[:, 2])
        assert torch.equal(now[:, :2], before[:, :2])
    cache.copy([])


# Attention.


class World:
    """Sequences in a poisoned paged cache of one size, and beside it their keys and values in one piece each."""

    def __init__(self, rng, heads: int, kv_heads: int, head_dim: int, size: int, num_blocks: int, shuffled=True):
        config = ModelConfig(11, 8, 1, heads, kv_heads, head_dim, 8, 512)
        self.heads = heads
        self.pool = BlockPool(num_blocks, size)
        if shuffled:
            rng.shuffle(self.pool._free)  # blocks come in no order
        self.cache = PagedCache(config, num_blocks, size, dtype=torch.float64)
        self.cache.k.fill_(float("nan")), self.cache.v.fill_(float("nan"))
        self.tables: list[BlockTable] = []
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []

    def add(self):
        self.tables.append(BlockTable(self.pool))
        empty = torch.empty(0, self.cache.k.shape[2], self.cache.k.shape[4], dtype=torch.float64)
        self.k.append(empty), self.v.append(empty)

    def fork(self, i: int):
        self.tables.append(self.tables[i].fork())
        self.k.append(self.k[i]), self.v.append(self.v[i])

    def remove(self, i: int):
        """End a sequence. Blocks that nobody else uses hold NaN from then on, as foreign memory may."""
        table = self.tables.pop(i)
        self.pool.free(table.blocks)
        gone = [block for block in table.blocks if not self.pool.ref_count(block)]
        self.cache.k[:, gone], self.cache.v[:, gone] = float("nan"), float("nan")
        del self.k[i], self.v[i]

    def step(self, which: list[int], counts: list[int]):
        """Give sequences some tokens each; the paged attention must be PyTorch's over each sequence alone."""
        total, (_, _, kv_heads, _, dim) = sum(counts), self.cache.k.shape
        q = torch.randn(total, self.heads, dim, dtype=torch.float64)
        k, v = (torch.randn(total, kv_heads, dim, dtype=torch.float64) for _ in range(2))
        tables, starts = [self.tables[i] for i in which], [len(self.k[i]) for i in which]
        copies = [pair for t, s, c in zip(tables, starts, counts, strict=True) for pair in t.prepare(s, s + c)]
        self.cache.copy(copies)
        out = self.cache.view(tables, starts, counts).attend(0, q, k, v)
        assert not out.isnan().any()
        for i, part, one_q, one_k, one_v in zip(which, *(x.split(counts) for x in (out, q, k, v)), strict=True):
            self.k[i], self.v[i] = torch.cat([self.k[i], one_k]), torch.cat([self.v[i], one_v])
            torch.testing.assert_close(part, alone(one_q, self.k[i], self.v[i]), rtol=1e-9, atol=1e-9)


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last len(q) tokens of one sequence: q [T, heads, D], k and v [S, kv_heads, D], heads written out."""
    group, new, end = q.shape[1] // k.shape[1], len(q), len(k)
    mask = torch.arange(end)[None] <= torch.arange(end - new, end)[:, None]
    heads = [x.transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(0, 1)


@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 2, 3, 5, 16]))
@settings(max_examples=25, deadline=None)
def test_attention_over_pages_is_that_of_each_sequence_alone(seed, size):
    """E5, E15, E16: any mix of chunks and decodes, shared blocks, blocks in no order, NaN wherever nothing is written.

    Key/value heads differ. Sequences come, fork and go; blocks of those that went hold NaN again.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed % 2**31)
    kv_heads = rng.choice([1, 2, 3])
    world = World(rng, kv_heads * rng.choice([1, 2, 3]), kv_heads, rng.choice([2, 6, 10]), size, -(-400 // size))
    for _ in range(rng.randrange(1, 4)):
        world.add()
    for _ in range(8):
        event = rng.random()
        if event < 0.2 and len(world.tables) < 7:
            world.fork(rng.randrange(len(world.tables)))
        elif event < 0.3 and len(world.tables) > 1:
            world.remove(rng.randrange(len(world.tables)))
        which = rng.sample(range(len(world.tables)), rng.randrange(1, len(world.tables) + 1))
        world.step(which, [rng.choice([1, 1, 1, rng.randrange(2, 9)]) for _ in which])
        world.pool.check(world.tables)


def grown(lengths: list[int], size: int, num_blocks: int, shuffled: bool = False) -> World:
    """Sequences of these lengths, each stored in one chunk; their blocks in a row, or in no order."""
    torch.manual_seed(1)
    world = World(random.Random(1), 6, 2, 4, size, num_blocks, shuffled)
    for i, length in enumerate(lengths):
        world.add()
        world.step([i], [length])
    return world


def test_decodes_read_the_pool_in_place_where_their_blocks_lie_together():
    """Lengths one below, at and one above the block's end, and 1: one stretch, foreign blocks with NaN in it."""
    world = grown([4, 11, 12, 13, 1], 4, 30)
    gone = world.tables[1].blocks
    world.remove(1)
    assert world.cache.k[0, gone].isnan().all(), "these blocks now belong to nobody"
    for _ in range(3):
        world.step([0, 1, 2, 3], [1, 1, 1, 1])
    assert [rows for rows, _ in blocks_read(world)] == [slice(0, 13)]


def blocks_read(world: World) -> list[tuple[slice | list[int], list[int]]]:
    """What each product of the next decode of all sequences reads, and whose queries it is multiplied with."""
    starts = [len(k) for k in world.k]
    for table, start in zip(world.tables, starts, strict=True):
        world.cache.copy(table.prepare(start, start + 1))
    groups = world.cache.view(world.tables, starts, [1] * len(starts)).plan.groups
    return [(g[0] if isinstance(g[0], slice) else g[0].tolist(), g[3].tolist()) for g in groups]


def test_decodes_copy_blocks_that_are_far_apart_each_of_them_once():
    """Blocks at both ends of a large pool; two of the four sequences share their first blocks."""
    world = grown([5, 7, 2], 2, 200, shuffled=True)
    world.fork(0)
    world.step([0, 1, 2, 3], [1, 1, 1, 1])
    (own, owners), (shared, both) = blocks_read(world)
    assert isinstance(own, list) and isinstance(shared, list), "nothing is read in place"
    assert shared == world.tables[0].blocks[:2] == world.tables[3].blocks[:2] and both == [0, 3, 0, 3]
    held = [(block, i) for i, table in enumerate(world.tables) for block in table.blocks if block not in shared]
    assert sorted(zip(own, owners, strict=True)) == sorted(held)
    for _ in range(3):
        world.step([0, 1, 2, 3], [1, 1, 1, 1])


def test_a_shared_block_is_read_once_for_all_who_share_it():
    """Four samples of a prompt, two of which part later: blocks with four users, with two and with one."""
    world = grown([9], 4, 30)
    world.fork(0), world.fork(0), world.fork(0)
    world.step([0, 1, 2], [4, 5, 2])
    world.remove(3)
    world.fork(0)
    for _ in range(6):
        world.step([0, 1, 2, 3], [1, 1, 1, 1])
    read = blocks_read(world)
    users = Counter(block for table in world.tables for block in table.blocks)
    assert sorted(set(users.values())) == [1, 2, 4]
    for (rows, owners), count in zip(read, (1, 2, 4), strict=True):
        blocks = [block for block, times in users.items() if times == count]
        assert rows == slice(min(blocks), max(blocks) + 1), "in place"
        assert sum(owner < 4 for owner in owners) == count * len(blocks), "the rest is nobody's"


def test_a_run_of_no_tokens_is_attended_like_any_other():
    """As with the other caches: an empty batch asks for nothing, writes nothing and gets nothing."""
    cache = poisoned(4, 2)
    q, k = torch.empty(0, 6, 10).double(), torch.empty(0, 2, 10).double()
    assert NoCache([]).attend(0, q, k, k).shape == cache.view([], [], []).attend(0, q, k, k).shape == q.shape
    assert cache.k.isnan().all() and cache.v.isnan().all()


def test_a_ragged_batch_equals_its_members_alone_and_has_no_nan():
    """E16: lengths from 1 to several blocks decode together; each row is that of the sequence alone."""
    world = grown([1, 2, 17, 16, 15, 40], 8, 40, shuffled=True)
    for _ in range(9):
        world.step(list(range(6)), [1] * 6)  # compares every row, and refuses NaN


# The model over pages.


@pytest.fixture(scope="module")
def model():
    made = Transformer(CONFIG).initialize(5).double().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter *= 8  # so that the next token depends on the whole prefix
    return made


def paged_hidden(model, cache, tables, sequences, starts, counts) -> tuple[torch.Tensor, ...]:
    """One pass of the model over some tokens of each sequence, through a paged cache."""
    for table, start, count in zip(tables, starts, counts, strict=True):
        cache.copy(table.prepare(start, start + count))
    tokens = [x for ids, s, c in zip(sequences, starts, counts, strict=True) for x in ids[s : s + c]]
    positions = [p for s, c in zip(starts, counts, strict=True) for p in range(s, s + c)]
    view = cache.view(tables, starts, counts)
    return model(torch.tensor(tokens), torch.tensor(positions), view).split(counts)


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_logits_are_those_of_the_contiguous_cache(model, size):
    """E5: sequences of unlike lengths in random chunks, in one paged and one contiguous cache, side by side."""
    rng = random.Random(size)
    sequences = [rng.choices(range(CONFIG.vocab_size), k=n) for n in (1, 15, 16, 17, 33)]
    pool = BlockPool(90, size)
    rng.shuffle(pool._free)
    tables, cache = [BlockTable(pool) for _ in sequences], poisoned(90, size)
    contiguous, taken = ContiguousCache(CONFIG, len(sequences), 40, dtype=torch.float64), [0] * len(sequences)
    while taken != [len(ids) for ids in sequences]:
        counts = [rng.randrange(min(6, len(ids) - t) + 1) for ids, t in zip(sequences, taken, strict=True)]
        if not any(counts):
            continue
        tokens = torch.tensor([x for ids, t, c in zip(sequences, taken, counts, strict=True) for x in ids[t : t + c]])
        expected = model(tokens, contiguous.positions(counts), contiguous.view(counts))
        some = [i for i, c in enumerate(counts) if c]  # a view has no sequence without new tokens
        args = ([values[i] for i in some] for values in (tables, sequences, taken, counts))
        got = torch.cat(paged_hidden(model, cache, *args))
        torch.testing.assert_close(model.logits(got), model.logits(expected), rtol=1e-9, atol=1e-9)
        taken = [t + c for t, c in zip(taken, counts, strict=True)]
    pool.check(tables)


def test_a_fork_goes_on_as_if_it_had_been_alone(model):
    """Two endings of one prompt, in shared blocks: each has the hidden states of its whole sequence, computed anew."""
    rng = random.Random(4)
    prompt = rng.choices(range(CONFIG.vocab_size), k=11)
    ends = [rng.choices(range(CONFIG.vocab_size), k=9) for _ in range(3)]
    pool, cache = BlockPool(20, 4), poisoned(20, 4)
    first = BlockTable(pool)
    paged_hidden(model, cache, [first], [prompt], [0], [11])
    tables = [first, first.fork(), first.fork()]
    for step in range(9):
        out = paged_hidden(model, cache, tables, [prompt + end for end in ends], [11 + step] * 3, [1] * 3)
        for end, part in zip(ends, out, strict=True):
            ids = prompt + end[: step + 1]
            whole = model(torch.tensor(ids), torch.arange(len(ids)), NoCache())[-1:]
            torch.testing.assert_close(part, whole, rtol=1e-9, atol=1e-9)
    assert len({tuple(table.blocks[:2]) for table in tables}) == 1 and len({table.blocks[2] for table in tables}) == 3
    pool.check(tables)


def test_the_first_decoded_token_stands_at_the_prompt_length(model, monkeypatch):
    """E6: a prompt of exactly one block, then its decodes, one by one."""
    seen, forward = [], Transformer.forward

    def spy(self, tokens, positions, cache):
        seen.append(positions.tolist())
        return forward(self, tokens, positions, cache)

    monkeypatch.setattr(Transformer, "forward", spy)
    config = EngineConfig(block_size=4, num_blocks=8)
    engine = Engine(ModelRunner(model, config), config)
    engine.add_request([7, 8, 9, 10], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    assert seen == [[0, 1, 2, 3], [4], [5], [6]]


# Sizes and errors.


def test_bytes_agree_with_the_formula():
    """Blocks * block size tokens of kv_bytes_per_token each."""
    cache = PagedCache(CONFIG, 7, 5, dtype=torch.bfloat16)
    assert cache.num_bytes == 7 * 5 * CONFIG.kv_bytes_per_token("bfloat16")


def prepared(tokens: int, pool: BlockPool) -> BlockTable:
    table = BlockTable(pool)
    table.prepare(0, tokens)
    return table


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BlockPool(0, 4), "num_blocks must be an integer of at least 1, got 0"),
        (lambda: BlockPool(4, 2.0), "block_size must be an integer of at least 1, got 2.0"),
        (lambda: BlockPool(True, 2), "num_blocks must be an integer of at least 1, got True"),
        (lambda: PagedCache(CONFIG, 4, 0), "block_size must be an integer of at least 1, got 0"),
        (lambda: BlockPool(4, 2).ref_count(4), "there is no block 4: this pool has blocks 0 to 3"),
        (lambda: BlockPool(4, 2).free([-1]), "there is no block -1"),
        (lambda: BlockPool(4, 2).fork([9]), "there is no block 9"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("start", "count", "message"),
    [
        (3, 2, "sequence 1 wants tokens 3 to 4; its table has room for 4"),
        (0, 0, "sequence 1 wants tokens 0 to -1"),
        (-1, 2, "sequence 1 wants tokens -1 to 0"),
    ],
)
def test_a_view_refuses_what_its_tables_have_no_room_for(start, count, message):
    """The message names the sequence, the tokens and the room."""
    pool = BlockPool(8, 2)
    cache, tables = poisoned(8, 2), [prepared(2, pool), prepared(4, pool)]
    with pytest.raises(ValueError, match=message):
        cache.view(tables, [0, start], [1, count])


def test_a_view_serves_a_run_of_its_own_length_only():
    cache = poisoned(8, 2)
    view = cache.view([prepared(3, BlockPool(8, 2))], [0], [3])
    q, k = torch.randn(2, 6, 10).double(), torch.randn(2, 2, 10).double()
    with pytest.raises(ValueError, match="this view is of a step of 3 tokens, the run has 2"):
        view.attend(0, q, k, k)
    with pytest.raises(ValueError, match="shorter|longer"):
        cache.view([prepared(3, BlockPool(8, 2))], [0, 1], [3])


# What chapter 5 says in words.


@pytest.fixture(scope="module")
def chapter() -> tuple[str, dict]:
    """The chapter's prose, and what its cells that count slots define and find; they run no model."""
    path = notebooks.ROOT / "book" / "05_paged_cache.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    source = {cell["id"]: "".join(cell["source"]) for cell in cells}
    found = {name: globals()[name] for name in ("BlockPool", "BlockTable", "ContiguousCache", "ModelConfig", "torch")}
    found |= {"np": np, "Counter": Counter, "deque": deque, "dataclass": dataclass}
    found["OutOfBlocks"] = OutOfBlocks
    counting = "lengths", "tally", "replay", "draws", "predict", "replay-pages", "blocks-held"
    for name in (*counting, "scene", "scene-rules", "play"):
        exec(source[name], found)
    return " ".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"), found


def test_the_numbers_in_the_chapter_are_what_its_cells_count(chapter):
    """B4: what is typed follows from the seeded workload and the formula."""
    text, found = chapter
    average, slots = found["average"], found["SLOTS"]
    assert f"some {round(average, -1):.0f} tokens" in text and f"{slots:,} slots" in text
    assert f"7.5 / (460 + 7.5) = {7.5 / 467.5:.1%}" in text and f"1 − {7.5 / (average + 7.5):.1%}" in text
    fit, alone = 1 + 4 * 4, 4 * -(-(19 + 58) // 16)
    assert f"1 + 4 · 4 = {fit} blocks in place of 4 · 5 = {alone}, a saving of {1 - fit / alone:.0%}" in text
    assert f"with blocks of 256, {BlockPool(2, 256).blocks_for(256 + 1) * 256} slots for {256 + 1} tokens" in text


def test_the_claims_of_the_chapter_hold_where_it_counts_them(chapter):
    """Under 4% of pages wasted, more than 60% of every reservation, and the paper's bars within three points."""
    _, found = chapter
    for name, paper in (("Max", (20.4, 13.3, 57.3, 8.9)), ("Oracle", (38.2, 25.2, 0.0, 36.6))):
        shares = found["shares"](found["reserved"][name])
        for use, percent in zip(("hold", "later", "never", "nobody"), paper, strict=True):
            assert abs(100 * shares[use] - percent) < 3, (name, use)
    assert all(found["shares"](seen)["hold"] < 0.4 for seen in found["reserved"].values())
    paged = found["replay_pages"](found["chats"], 16)
    assert found["shares"](paged)["hold"] > 0.96 and paged["hold"] / (paged["hold"] + paged["never"]) > 0.98
    at_a_time = found["shares"](paged)["running"]
    assert (
        at_a_time > found["predicted_running"] and at_a_time > 4 * found["shares"](found["reserved"]["Max"])["running"]
    )
    assert 0 < found["saving"]([(19, 58)] * 3, 2) < found["saving"]([(161, 338)], 2)


def test_what_the_chapter_says_of_other_draws_holds_for_those_it_makes(chapter):
    """B4: the first draw lies close to the paper by luck; the pattern is every draw's."""
    text, found = chapter
    paper = {"Max": (20.4, 13.3, 57.3, 8.9), "Oracle": (38.2, 25.2, 0.0, 36.6)}
    gaps = [
        abs(100 * draw[name][use] - percent)
        for draw in found["draws"]
        for name in paper
        for use, percent in zip(("hold", "later", "never", "nobody"), paper[name], strict=True)
    ]
    assert 7 < max(gaps) < 8 and "the other draws lie up to eight points away" in text
    for draw in [*found["draws"], {name: found["shares"](seen) for name, seen in found["reserved"].items()}]:
        assert draw["Max"]["hold"] < 0.25, "under a quarter holds anything"
        assert draw["Oracle"]["hold"] < 0.5, "even an oracle wastes most of it"
        assert abs(100 * draw["Pow2"]["nobody"] - 41.6) > 3, "further off"


def test_room_left_free_trades_sequences_for_work_done_twice(chapter):
    """B4: the words about the table of what newcomers leave free."""
    text, found = chapter
    tokens = sum(map(sum, found["chats"]))
    first, tenth = (found["replay_pages"](found["chats"], 16, part) for part in (1 / 50, 1 / 10))
    assert found["replay_pages"](found["chats"], 16) == first, "the first row is the replay above"
    assert first["again"] / tokens > 0.2 and "more than a fifth of all tokens are computed twice" in text
    assert 0.02 < tenth["again"] / tokens < 0.05 and "With a tenth left free it is a few percent" in text
    assert 1 < found["shares"](first)["running"] - found["shares"](tenth)["running"] < 4, "a few sequences"


def test_the_scene_of_the_knobs_plays_as_the_chapter_tells_it(chapter):
    """B4: the steps named below the explorer are those at which it happens."""
    text, found = chapter
    scenes = {size: [found["play"](size, step) for step in range(13)] for size in (4, 8, 24)}
    handed = {size: [size * (s.pool.num_blocks - s.pool.num_free) for s in played] for size, played in scenes.items()}

    def first(size, happens) -> int:
        return next(step for step, scene in enumerate(scenes[size]) if happens(scene))

    def stuck(scene) -> bool:
        return "C finds no free block" in scene.log

    for size in (4, 8):
        assert "Block" in scenes[size][1].log and "B starts, a fork of A." in scenes[size][1].log
        tables = scenes[size][1].tables
        shared = 9 // size
        assert tables["A"].blocks[:shared] == tables["B"].blocks[:shared] and tables["A"].blocks != tables["B"].blocks
    assert "At step 1 sample B begins: it shares A's full blocks, and the block that is full in part is copied" in text
    assert handed[24][0] == 24 and handed[24][1] == 48 and "B's copy takes all 24 slots" in text
    assert sum(scenes[24][3].stored.values()) == 24 and "half of the memory is empty" in text
    for name, ends in (("C", "B"), ("D", "A")):
        joined = first(24, lambda scene, name=name: name in scene.tables)
        assert f"{ends} has ended. {name} starts." in scenes[24][joined].log
    run = first(4, lambda scene: len(scene.tables) == 4)
    assert f"With blocks of 4 all four run by step {run}." in text
    full, sooner = first(4, stuck), first(8, stuck)
    assert f"comes at step {full}: the pool is full, C finds no free block and stands still for a step." in text
    assert handed[4][full] == 48 and [stuck(scene) for scene in scenes[4]].count(True) == 1
    assert f"With blocks of 8 that comes sooner, at step {sooner}, since more slots are empty." in text
    assert scenes[4][run].stored == scenes[8][run].stored and handed[8][run] > handed[4][run]
    longest = {size: max(len(t.blocks) for s in played for t in s.tables.values()) for size, played in scenes.items()}
    assert longest[4] > longest[8] > longest[24] and "Small blocks make the longest tables." in text


def test_the_start_of_a_freed_sequence_is_reused_first():
    """Its last block is freed first, and the block freed last is given away first."""
    pool = BlockPool(6, 2)
    blocks = [pool.allocate() for _ in range(3)]
    for order in (blocks, [blocks[1], blocks[2], blocks[0]]):
        pool.free(order)
        assert [pool.allocate() for _ in order] == order


def test_a_refused_free_changes_nothing():
    """Whoever asks to free a block once too often keeps the others of the same call."""
    pool = BlockPool(4, 2)
    blocks = [pool.allocate(), pool.allocate()]
    for wrong in ([*blocks, blocks[0]], [blocks[1], 3], [blocks[0], 9]):
        with pytest.raises(ValueError, match=r"free already|no block"):
            pool.free(wrong)
        assert pool.num_free == 2 and [pool.ref_count(b) for b in blocks] == [1, 1]


def test_keys_of_other_heads_are_refused():
    """E15: a single head would be broadcast to all without an error."""
    config = ModelConfig(vocab_size=9, dim=8, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=4, ffn_dim=8, max_context=8)
    cache, pool = PagedCache(config, 2, 4), BlockPool(2, 4)
    table = BlockTable(pool)
    table.prepare(0, 3)
    view = cache.view([table], [0], [3])
    q, k = torch.randn(3, 4, 4), torch.randn(3, 2, 4)
    for bad in (k[:, :1], k[:2], k[..., :3]):
        with pytest.raises(ValueError, match=r"k and v must be \[3, 2, 4\]"):
            view.attend(0, q, bad, bad)
