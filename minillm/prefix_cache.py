"""The prefix cache: keys and values that a finished request leaves behind serve whoever starts alike.

A radix tree over whole blocks (RadixAttention, Zheng et al., 2024), keyed by the tokens themselves. It lives in the
pool of all other blocks: the tree is one more user of each block it holds, and gives blocks back when they are needed.
So free memory is cache, and cache is free memory.

Who owns what: `match` finds blocks, `lock` keeps them from being evicted while a request uses them, `insert` adds what
the request has computed, `unlock` lets go. Whoever takes blocks adds itself as a user with `BlockPool.fork`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from minillm.paged_cache import BlockPool


class Node:
    """A run of whole blocks that follows its parent's. `children` are found by the tokens of their first block.

    `locks` counts the requests that use this node or one below it. `offered`: it is in the heap for eviction.
    """

    __slots__ = ("blocks", "children", "last_used", "locks", "offered", "parent", "tokens")

    def __init__(self, tokens: tuple[int, ...], blocks: list[int], parent: Node | None):
        self.tokens, self.blocks, self.parent = tokens, blocks, parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = self.last_used = 0
        self.offered = False


class PrefixCache:
    """A tree of computed blocks of `pool`. Every operation costs time in proportion to the prefix it walks."""

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.root = Node((), [], None)
        self.num_blocks = 0  # blocks in the tree
        self.num_evictable = 0  # of those, blocks that no running request uses
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # a heap for eviction, one entry a node, perhaps stale

    def match(self, tokens: Sequence[int]) -> tuple[Node, list[int]]:
        """The longest cached start of `tokens` in whole blocks: its node, to be locked, and its blocks.

        A request that takes them should ask with its last token left out, so that there is one left to compute: the
        next token is drawn from what the model says of the last.
        """
        node, blocks = self.root, []
        self._clock += 1
        for node, shared in self._walk(tokens):
            if shared < len(node.blocks):
                node = self._split(node, shared)
            blocks += node.blocks
            self._touch(node)
        return node, blocks

    def peek(self, tokens: Sequence[int]) -> int:
        """How many blocks `match` would find; changes nothing."""
        return sum(shared for _, shared in self._walk(tokens))

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> tuple[Node, list[int]]:
        """Add computed blocks; `tokens` fills them exactly. Returns what `match` finds from now on.

        Where the tree has those tokens already it keeps its own blocks, and the caller's stay the caller's. Raises
        ValueError if tokens and blocks do not fit each other.
        """
        size = self.pool.block_size
        if len(tokens) != len(blocks) * size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(blocks)} blocks of {size} exactly")
        node, known = self.match(tokens)
        if len(known) < len(blocks):
            rest = self.pool.fork(blocks[len(known) :])
            node = self._attach(node, Node(tuple(tokens[len(known) * size :]), rest, node))
            self.num_blocks += len(rest)
            self.num_evictable += len(rest)
            self._touch(node)
            known += rest
        return node, known

    def lock(self, node: Node) -> None:
        """Keep `node` and all above it, until `unlock`."""
        while node is not self.root:
            if not node.locks:
                self.num_evictable -= len(node.blocks)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises ValueError if there was none."""
        while node is not self.root:
            if not node.locks:
                raise ValueError(f"a node of {len(node.blocks)} blocks is not locked")
            node.locks -= 1
            if not node.locks:
                self.num_evictable += len(node.blocks)
                self._offer(node)
            node = node.parent

    def evict(self, num_blocks: int) -> int:
        """Give back `num_blocks` blocks, or all that nobody uses; returns how many.

        The end of the leaf that was used least recently goes first; a start goes only after everything that follows.
        """
        freed = 0
        while freed < num_blocks and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            node.offered = False
            if node.locks or node.children or last_used != node.last_used:
                self._offer(node)  # stale: it was used, or grew, since it was offered
                continue
            count = min(len(node.blocks), num_blocks - freed)
            self.pool.free(node.blocks[-count:])
            key = self._key(node.tokens)
            node.blocks, node.tokens = node.blocks[:-count], node.tokens[: -count * self.pool.block_size]
            if not node.blocks:
                del node.parent.children[key]
            freed += count
            self._offer(node if node.blocks else node.parent)
        self.num_blocks -= freed
        self.num_evictable -= freed
        return freed

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before their children."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def check(self) -> None:
        """Walk the tree; raises AssertionError unless keys, sizes, counts and locks agree, each block in it once."""
        size, uses, free_again = self.pool.block_size, Counter(), 0
        for node in self.nodes():
            assert node.blocks and len(node.tokens) == len(node.blocks) * size, "a node is not made of whole blocks"
            assert node.parent.children.get(self._key(node.tokens)) is node, "a node is not where its tokens say"
            assert node.locks >= sum(child.locks for child in node.children.values()), (
                "a child is locked, its parent not"
            )
            uses.update(node.blocks)
            free_again += 0 if node.locks else len(node.blocks)
            for block in node.blocks:
                users = self.pool.ref_count(block)
                assert users >= 1, f"block {block} is cached and free"
                assert node.locks or users == 1, f"block {block} is in use, and its node is not locked"
        assert not uses or max(uses.values()) == 1, "a block is in the tree twice"
        assert (len(uses), free_again) == (self.num_blocks, self.num_evictable), "the counts do not add up"

    def _walk(self, tokens: Sequence[int]) -> Iterator[tuple[Node, int]]:
        """Nodes along `tokens`, each with the count of its blocks that agree; the last may agree in part."""
        size, node, done = self.pool.block_size, self.root, 0
        while True:
            node = node.children.get(tuple(tokens[done : done + size]))
            if node is None:
                return
            shared = 1
            while shared < len(node.blocks):
                place = shared * size
                if tuple(tokens[done + place : done + place + size]) != node.tokens[place : place + size]:
                    break
                shared += 1
            partly = shared < len(node.blocks)  # asked now: the caller may split the node
            yield node, shared
            if partly:
                return
            done += shared * size

    def _split(self, node: Node, count: int) -> Node:
        """Cut a node behind its first `count` blocks; returns the upper part. The lower one keeps its identity."""
        cut = count * self.pool.block_size
        upper = Node(node.tokens[:cut], node.blocks[:count], node.parent)
        upper.locks, upper.last_used = node.locks, node.last_used
        self._attach(node.parent, upper)
        node.tokens, node.blocks, node.parent = node.tokens[cut:], node.blocks[count:], upper
        self._attach(upper, node)
        return upper

    def _attach(self, parent: Node, node: Node) -> Node:
        parent.children[self._key(node.tokens)] = node
        return node

    def _key(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tokens[: self.pool.block_size]

    def _touch(self, node: Node) -> None:
        node.last_used = self._clock
        self._offer(node)

    def _offer(self, node: Node) -> None:
        """A candidate for eviction, if it is one: unlocked, and with nothing below it."""
        if node is not self.root and not (node.offered or node.locks or node.children):
            node.offered = True
            heapq.heappush(self._leaves, (node.last_used, id(node), node))
