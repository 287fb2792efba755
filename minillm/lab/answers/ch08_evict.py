"""Chapter 8's eviction: the order in which a tree gives its blocks back, and what goes wrong in finding it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minillm.lab.checks import Draw


def right_evict(nodes: dict[str, tuple], count: int, *, wrong: str = "") -> list[str]:
    """Block by block, from the unlocked leaf that was used least recently; `wrong` names a slip."""
    left, gone = {name: blocks for name, (_, blocks, _, _) in nodes.items()}, []
    leaves_at_start = {name for name in nodes if name not in {parent for parent, *_ in nodes.values()}}
    emptied, round_of = "", []  # for the slips that go on from there
    while len(gone) < count:
        inner = {nodes[name][0] for name in left} if wrong != "inner nodes" else set()
        allowed = [
            name
            for name in left
            if name not in inner
            and (wrong == "locks" or not nodes[name][3])
            and (wrong != "leaves once" or name in leaves_at_start)
        ]
        if not allowed:
            break
        if wrong == "rounds":
            round_of = allowed = [name for name in round_of if name in left] or allowed
        if wrong == "climbs" and emptied and nodes[emptied][0] in allowed:
            allowed = [nodes[emptied][0]]
        pick = max if wrong == "newest" else min
        name = pick(allowed, key=lambda name: nodes[name][1] if wrong == "smallest" else nodes[name][2])
        taken = left[name] if wrong == "whole nodes" else 1
        gone += [name] * taken
        left[name] -= taken
        emptied = "" if left[name] else name
        if emptied:
            del left[name]
    return gone


def evict_cases(draw: Draw) -> Iterator[tuple]:
    """One leaf; a chain; two branches of unlike age; locks; more asked than there is; then random trees."""
    yield {"a": (None, 3, 5, 0)}, 2
    yield {"a": (None, 2, 9, 0), "b": ("a", 1, 9, 0)}, 2
    yield {"a": (None, 1, 1, 0), "b": ("a", 3, 8, 0), "c": ("a", 2, 4, 0)}, 3
    yield {"a": (None, 2, 7, 1), "b": ("a", 2, 7, 1), "c": ("a", 3, 2, 0)}, 9
    yield {"a": (None, 1, 3, 0), "b": (None, 4, 2, 2), "c": (None, 1, 6, 0)}, 5
    yield {"a": (None, 2, 3, 0)}, 0
    yield {"a": (None, 2, 1, 0), "b": ("a", 1, 5, 0), "c": (None, 3, 4, 0)}, 5
    yield {"a": (None, 1, 9, 0), "b": ("a", 1, 1, 0), "c": (None, 1, 5, 0)}, 2
    yield {"a": (None, 1, 2, 0), "b": ("a", 1, 1, 0), "c": (None, 1, 5, 0)}, 3
    for _ in range(12):
        yield random_tree(draw), draw.randrange(1, 12)


def random_tree(draw: Draw) -> dict[str, tuple]:
    """Nodes a to h: a parent was used at least as late as what is below it, and is locked if that is."""
    names = "abcdefgh"[: draw.randrange(3, 9)]
    parents = {name: draw.choice([None, *names[:index]]) for index, name in enumerate(names)}
    used = dict(zip(names, draw.sample(range(1, 50), len(names)), strict=True))
    locked = dict.fromkeys(names, 0)
    for name in reversed(names):
        if parents[name] is not None:
            used[parents[name]] = max(used[parents[name]], used[name])
    for name in names:
        if draw.random() < 0.25:
            at = name
            while at is not None:
                locked[at] += 1
                at = parents[at]
    return {name: (parents[name], draw.randrange(1, 4), used[name], locked[name]) for name in names}


def evict_slip(slip: str) -> Callable:
    """`right_evict` with one slip."""
    return lambda nodes, count: right_evict(nodes, count, wrong=slip)


EVICT_MISTAKES = {
    "a node with locks is in use: a request would read what another writes there": evict_slip("locks"),
    "only a leaf may lose blocks: what follows a start cannot be found without it": evict_slip("inner nodes"),
    "the least recently used goes first; this is the most recently used": evict_slip("newest"),
    "a parent whose last child is gone is one leaf among others: again the least recently used goes": evict_slip(
        "climbs"
    ),
    "look for the leaves anew for each block: a parent that became one may be older than they are": evict_slip(
        "rounds"
    ),
    "go by the time of last use, not by the size": evict_slip("smallest"),
    "take blocks one by one, and stop when there are enough: this empties whole nodes": evict_slip("whole nodes"),
    "a node whose last child is gone is a leaf from then on": evict_slip("leaves once"),
}
