"""The prefix cache against a cache that is a plain set of prefixes, and its own check against planted faults."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.paged_cache import BlockPool
from minillm.prefix_cache import PrefixCache


def add(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """What a finished request does: take blocks, insert the whole ones, let its own use of them go."""
    size = cache.pool.block_size
    blocks = [cache.pool.allocate() for _ in range(len(tokens) // size)]
    cache.insert(tokens[: len(blocks) * size], blocks)
    cache.pool.free(blocks)
    return blocks


def test_match_gives_the_longest_start_in_whole_blocks():
    """Starts of starts, and prompts one token shorter than, as long as, and longer than a block border."""
    pool = BlockPool(20, 3)
    cache = PrefixCache(pool)
    blocks = add(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert cache.num_blocks == 3  # the tenth token fills no block
    for length, found in [(2, 0), (3, 1), (4, 1), (5, 1), (6, 2), (8, 2), (9, 3), (12, 3)]:
        assert cache.match(list(range(1, 13))[:length])[1] == blocks[:found], length
    assert cache.match([1, 2, 3, 4, 5, 7])[1] == blocks[:1]
    assert cache.match([2, 2, 3])[1] == []
    cache.check()


def test_an_insert_that_parts_in_the_middle_of_a_node_splits_it():
    pool = BlockPool(20, 2)
    cache = PrefixCache(pool)
    first = add(cache, [1, 1, 2, 2, 3, 3])
    node, _ = cache.match([1, 1, 2, 2, 3, 3])
    cache.lock(node)
    second = add(cache, [1, 1, 2, 2, 4, 4])
    cache.check()
    assert cache.match([1, 1, 2, 2, 4, 4])[1] == [*first[:2], second[2]]
    assert pool.num_free == 20 - 4, "the blocks that the tree had already are free again"
    assert cache.evict(99) == 1, "only the second branch's end is not locked"
    cache.unlock(node)  # the lower part kept its identity through the split
    assert cache.evict(99) == 3
    assert pool.num_free == 20
    cache.check()


def test_least_recently_used_ends_go_first():
    """E2: eviction is by whole blocks, from the end, and never below a lock."""
    pool = BlockPool(20, 2)
    cache = PrefixCache(pool)
    for branch in (3, 4, 5):
        add(cache, [1, 1, branch, branch, branch, branch])
    cache.match([1, 1, 3, 3, 3, 3])  # used again: 4 is now the oldest
    held, _ = cache.match([1, 1, 5, 5])
    cache.lock(held)
    assert cache.evict(1) == 1
    assert len(cache.match([1, 1, 4, 4, 4, 4])[1]) == 2
    assert cache.evict(100) == 4, "all but the locked start and the first block of branch 5"
    assert len(cache.match([1, 1, 5, 5, 5, 5])[1]) == 2
    cache.check()
    cache.unlock(held)
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(held)


def test_insert_refuses_what_does_not_fill_its_blocks():
    cache = PrefixCache(BlockPool(4, 3))
    block = cache.pool.allocate()
    with pytest.raises(ValueError, match="4 tokens do not fill 1 blocks of 3"):
        cache.insert([1, 2, 3, 4], [block])


def test_peek_says_what_match_would_find_and_changes_nothing():
    cache = PrefixCache(BlockPool(20, 2))
    add(cache, [1, 1, 2, 2, 3, 3])
    add(cache, [4, 4])
    before = [(id(node), list(node.blocks), node.last_used, node.locks) for node in cache.nodes()]
    for tokens, blocks in ([1, 1, 2, 2, 9], 2), ([1, 1, 9, 9], 1), ([], 0), ([1], 0), ([4, 4, 4, 4], 1):
        assert cache.peek(tokens) == blocks
    assert before == [(id(node), list(node.blocks), node.last_used, node.locks) for node in cache.nodes()]
    for tokens, blocks in ([1, 1, 2, 2, 9], 2), ([1, 1, 9, 9], 1), ([], 0), ([4, 4, 4, 4], 1):
        assert len(cache.match(tokens)[1]) == blocks
        cache.check()


def test_a_split_under_a_lock_keeps_both_parts():
    """E2: the lock of the matched node holds, and so do those above it, wherever the node is cut later."""
    pool = BlockPool(20, 3)
    cache = PrefixCache(pool)
    blocks = add(cache, list(range(12)))
    node, found = cache.match(list(range(12)))
    cache.lock(node)
    cache.lock(node)
    for cut in (2, 1, 3):  # match splits where it stops
        upper, part = cache.match(list(range(3 * cut)))
        assert part == blocks[:cut] and upper.locks == 2
        cache.check()
    assert cache.num_evictable == 0 and cache.evict(5) == 0
    cache.unlock(node)
    assert cache.evict(5) == 0, "the second lock still holds all four parts"
    cache.unlock(node)
    assert cache.num_evictable == 4 and cache.evict(1) == 1 and cache.match(list(range(12)))[1] == blocks[:3]
    assert found == blocks
    cache.check()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_eviction_takes_as_many_blocks_as_asked_and_stays_aligned(size):
    """E2: with blocks of several tokens, what is left of a node is whole blocks, and its start is still found."""
    pool = BlockPool(12, size)
    cache = PrefixCache(pool)
    tokens = [t for t in range(6) for _ in range(size)]
    blocks = add(cache, tokens)
    for taken in (1, 2):
        assert cache.evict(taken) == taken
        cache.check()
    assert cache.match(tokens)[1] == blocks[:3] and pool.num_free == 9
    assert cache.evict(0) == cache.evict(-2) == 0
    assert cache.evict(50) == 3 and not list(cache.nodes()) and pool.num_free == 12


def test_the_tree_keeps_its_own_blocks_where_two_computed_the_same():
    """E1: two equal prompts of one step; the second one's blocks stay its own and are free when it frees them."""
    pool = BlockPool(10, 2)
    cache = PrefixCache(pool)
    tables = [[pool.allocate(), pool.allocate()] for _ in range(2)]
    (first, kept), (second, same) = (cache.insert([1, 2, 3, 4], table) for table in tables)
    assert first is second and kept == same == cache.match([1, 2, 3, 4])[1] == tables[0]
    assert [pool.ref_count(block) for block in tables[0] + tables[1]] == [2, 2, 1, 1]
    for table in tables:
        pool.free(table)
    cache.check()
    assert pool.num_free == 8 and cache.num_blocks == 2


def test_a_cache_that_never_evicts_does_not_grow_with_use():
    """One entry for eviction a node, however often it is used; and the order by last use still holds."""
    pool = BlockPool(20, 2)
    cache = PrefixCache(pool)
    for start in (1, 2, 3):
        add(cache, [start, start, 9, 9])
    for start in [1, 2, 3] * 200 + [2, 1]:
        node, _ = cache.match([start, start, 9, 9])
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._leaves) <= len(list(cache.nodes()))
    for gone in (3, 2, 1):
        assert cache.evict(2) == 2 and cache.peek([gone, gone, 9, 9]) == 0
        cache.check()
    assert pool.num_free == 20


@pytest.mark.parametrize("fault", ["lock", "count", "tokens", "freed", "parent", "twice", "half a block", "unlocked"])
def test_check_finds_planted_faults(fault):
    """E2: the check walks the tree; it is not an empty function."""
    cache = PrefixCache(BlockPool(20, 2))
    add(cache, [1, 1, 2, 2, 3, 3])
    add(cache, [1, 1, 4, 4])
    cache.check()
    node = cache.match([1, 1, 4, 4])[0]
    if fault == "lock":
        node.locks += 1
    elif fault == "count":
        cache.num_evictable -= 1
    elif fault == "tokens":
        node.tokens = (5, 5)
    elif fault == "freed":
        cache.pool.free(node.blocks)
    elif fault == "twice":
        node.blocks = list(cache.match([1, 1, 2, 2])[0].blocks)
    elif fault == "half a block":
        node.tokens = node.tokens[:1]
    elif fault == "unlocked":
        cache.pool.fork(node.blocks)
    else:
        node.parent.blocks, node.parent.tokens = [], ()
    with pytest.raises(AssertionError):
        cache.check()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_random_use_agrees_with_a_set_of_prefixes(seed, size):
    """A model of the cache is the set of all starts that were inserted and not evicted; blocks never mix up."""
    rng = random.Random(seed)
    cache = PrefixCache(BlockPool(30, size))
    pool, running, content = cache.pool, [], {}
    for _ in range(80):
        if running and rng.random() < 0.4:
            tokens, blocks, node = running.pop(rng.randrange(len(running)))
            full = len(tokens) // size
            cache.insert(tokens[: full * size], blocks[:full])
            cache.unlock(node)
            pool.free(blocks)
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 6 * size))]
            node, blocks = cache.match(tokens[:-1])
            for index, block in enumerate(blocks):
                assert content[block] == tokens[: (index + 1) * size], "a block of another text"
            assert len(blocks) * size < len(tokens), "a token is left to compute"
            cache.lock(node)
            blocks = pool.fork(blocks)
            need = -(-len(tokens) // size) - len(blocks)
            cache.evict(need - pool.num_free)
            if need > pool.num_free:
                cache.unlock(node)
                pool.free(blocks)
                continue
            while need > 0:
                blocks.append(pool.allocate())
                need -= 1
                content[blocks[-1]] = tokens[: len(blocks) * size]
            running.append((tokens, blocks, node))
        cache.check()
    for _, blocks, node in running:
        cache.unlock(node)
        pool.free(blocks)
    cache.check()
    cache.evict(99)
    assert pool.num_free == 30 and cache.num_blocks == 0
