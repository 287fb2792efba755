"""The exercises of chapter 8: answers right and wrong for `test_exercises.py`; the references are the engine's."""

from solutions import answered, code, prose

from minillm.lab.answers import ch08, ch08_evict
from minillm.lab.checks import Draw
from minillm.paged_cache import BlockPool
from minillm.prefix_cache import PrefixCache

CHAPTER = "08_prefix_cache"
BUILT = {"insert": ch08.insert, "evict": ch08.evict}
SPLIT = "            tree[key] = (run[:shared], {run[shared : shared + size]: (run[shared:], below)})\n"
OVERWRITTEN = "            tree[key] = (rest, {})\n            return (len(rest) - shared) // size\n"
PARTS = "        if shared < len(run):\n"
# Case E2, as a reader would make it.
WRONG_BUILT = [
    ("insert", [("tuple(tokens[: len(tokens) // size * size])", "tuple(tokens)")], "behind the last whole block"),
    ("insert", [(SPLIT, OVERWRITTEN)], "the old end"),
    ("insert", [("(run[shared:], below)", "(run[shared:], {})")], "those branches went missing"),
    ("insert", [("(run[shared:], below)})", "(run[shared:], {}), **below})")], "belong below its lower part"),
    ("insert", [(PARTS, "        if shared == len(rest):\n            return 0\n" + PARTS)], "ends within a run"),
    ("insert", [("shared < len(run) and run", "False and run")], "follow a run as far as the text agrees"),
    ("insert", [("return len(rest) // size", "return len(tokens) // size")], r"\['added'\]\[\d+\] should be"),
    ("insert", [("return len(rest) // size", "return len(rest)")], r"\['added'\]\[\d+\] should be"),
    ("insert", [("    return 0", "    return None")], r"\['added'\]\[\d+\] should be"),
    ("insert", [("tree[key] = (rest, {})", "tree[key] = rest")], "there is no pair"),
    ("insert", [("rest, tree = rest[shared:], tree[key][1]", "rest, tree = rest[shared:], tree")], "on the input"),
    ("evict", [(" and nodes[name][3] == 0", "")], "a node with locks is in use"),
    ("evict", [("name not in parents and ", "")], "only a leaf may lose blocks"),
    ("evict", [("oldest = min", "oldest = max")], "most recently used"),
    ("evict", [("nodes[name][2])", "nodes[name][1])")], "not by the size"),
    ("evict", [("gone.append(oldest)", "gone += [oldest] * left[oldest]"), ("[oldest] -= 1", "[oldest] = 0")],
     "take blocks one by one"),
    ("evict", [("oldest = min(leaves", "up = [nodes[name][0] for name in gone[-1:] if name not in left]\n        "
                "oldest = min([name for name in leaves if name in up] or leaves")], "one leaf among others"),
    ("evict", [("    gone = []\n", "    gone, last = [], []\n"),
               ("oldest = min(leaves", "last = [name for name in last if name in left] or leaves\n        "
                "oldest = min(last")], "anew for each block"),
    ("evict", [("for name in left}", "for name in nodes}")], "is a leaf from then on|items, got"),
    ("evict", [("len(gone) < count", "len(gone) <= count")], "items, got"),
    ("evict", [("            break", '            raise RuntimeError("nothing left")')], "raised RuntimeError"),
    ("evict", [("    return gone", "    return len(gone)")], "should be a list"),
]  # fmt: skip

RIGHT = {
    ch08.chat_hits: (200 / 3, 384, 175 / 3, 1.5),
    ch08.thrash: (0, 70, 87.5, "the one that is needed next is evicted"),
}
WRONG_NUMBERS = [  # check, which argument is wrong, the wrong value, what the message says
    (ch08.chat_hits, 0, 2 / 3, "rate: .*in % is asked"),
    (ch08.chat_hits, 0, 100 / 3, "rate: .*share that is new"),
    (ch08.chat_hits, 0, 20, "rate: .*add up all four"),
    (ch08.chat_hits, 0, 75, "rate: .*count tokens, not turns"),
    (ch08.chat_hits, 0, 58.33, "rate: .*answer is in the cache"),
    (ch08.chat_hits, 1, 400, "found: .*never fed back"),
    (ch08.chat_hits, 1, 399, "found: .*only whole blocks"),
    (ch08.chat_hits, 1, 288, "found: .*answer's keys and values"),
    (ch08.chat_hits, 1, 300, "found: .*only whole blocks"),
    (ch08.chat_hits, 1, 24, "found: .*that is blocks"),
    (ch08.chat_hits, 2, 66.67, "prompts_only: .*without them"),
    (ch08.chat_hits, 2, 25, "prompts_only: .*not one message"),
    (ch08.chat_hits, 2, 0.5833, "prompts_only: .*in % is asked"),
    (ch08.chat_hits, 3, 3, "gain: .*other half"),
    (ch08.chat_hits, 3, 4 / 3, "gain: .*its inverse"),
    (ch08.chat_hits, 3, 2 / 3, "gain: .*time that is left"),
    (ch08.chat_hits, 3, 2, "gain: .*hit rate of 1"),
    (ch08.chat_hits, 3, "1.5", "gain: expected a number"),
    (ch08.thrash, 0, 80, "cyclic: .*those that come next"),
    (ch08.thrash, 0, 20, "cyclic: .*run it"),
    (ch08.thrash, 0, 12.5, "cyclic: .*run it"),
    (ch08.thrash, 1, 0.7, "there_and_back: .*in % is asked"),
    (ch08.thrash, 1, 30, "there_and_back: .*share that is computed"),
    (ch08.thrash, 1, 87.5, "there_and_back: .*furthest from it"),
    (ch08.thrash, 1, 0, "there_and_back: .*run the experiment"),
    (ch08.thrash, 2, 100, "together: .*computed once"),
    (ch08.thrash, 2, 80, "together: .*not once in five"),
    (ch08.thrash, 2, 12.5, "together: .*share that is computed"),
    (ch08.thrash, 2, 0, "together: .*run the experiment"),
    (ch08.thrash, 2, 0.875, "together: .*in % is asked"),
    (ch08.thrash, 3, "blocks are too large", "conclusion: .*would change nothing"),
    (ch08.thrash, 3, "locks keep too much", "conclusion: .*one request runs"),
    (ch08.thrash, 3, "four fifths of the starts are in the pool", "conclusion: .*which one is missing"),
]  # fmt: skip
MISTAKES = [(ch08.insert_cases, ch08.INSERT_MISTAKES), (ch08_evict.evict_cases, ch08_evict.EVICT_MISTAKES)]
# Who locks a node locks all above it, so a tree without the locked nodes has the leaves that may be taken.
WITHOUT_LOCKED = answered(
    CHAPTER,
    "evict",
    ("(_, blocks, _, _) in nodes.items()", "(_, blocks, _, locks) in nodes.items() if not locks"),
    (" and nodes[name][3] == 0", ""),
)
OTHER_WAYS = [("evict", WITHOUT_LOCKED)]


def test_the_texts_state_the_conditions_that_the_checks_use():
    """B4: a number typed twice drifts."""
    text = prose(CHAPTER)
    assert f"the user writes {ch08.MESSAGE} tokens and gets an answer of {ch08.REPLY}" in text
    assert "A chat has four turns" in text and ch08.TURNS == 4
    assert f"with blocks of {ch08.BLOCK}" in text and "half of the time went into prompts" in text
    assert f"send {ch08.REQUESTS} requests" in text and ch08.PREFILL_SHARE == 0.5
    source = code("solutions", CHAPTER)["thrash-run"]
    assert f"request % {ch08.STARTS} for request in range({ch08.REQUESTS})" in source
    assert f"in_turn, {ch08.ROOM})" in source


# What the checks take for right, held to the engine.


def test_the_experiment_gives_the_rates_that_the_check_expects():
    cells, namespace = code("solutions", CHAPTER), {}
    for key in ("imports", "thrash-run", "thrash-answer"):
        exec(cells[key], namespace)
    assert (namespace["cyclic"], namespace["there_and_back"], namespace["together"]) == (0, ch08.BACK, 87.5)


def engine_tree(node) -> dict:
    """The engine's tree in the form of the exercise."""
    return {key: (child.tokens, engine_tree(child)) for key, child in node.children.items()}


def test_the_tree_is_the_engines():
    """But for splits where a text ends, which the engine makes too, all that `insert` builds is what it builds."""
    for texts, size in [*ch08.insert_cases(Draw(3)), *ch08.insert_cases(Draw(4))]:
        cache, tree = PrefixCache(BlockPool(400, size)), {}
        for text in texts:
            whole = len(text) // size
            blocks, before = [cache.pool.allocate() for _ in range(whole)], cache.num_blocks
            cache.insert(text[: whole * size], blocks)
            assert ch08.right_insert(tree, text, size) == cache.num_blocks - before
        assert tree == engine_tree(cache.root)


def planted(nodes: dict[str, tuple]) -> tuple[PrefixCache, dict[int, str]]:
    """The nodes as a tree of the engine, and which of them each block belongs to."""
    cache, names, paths = PrefixCache(BlockPool(60, 1)), {}, {None: []}
    for number, (name, (parent, count, _, _)) in enumerate(nodes.items()):
        paths[name] = [*paths[parent], *(1000 * number + i for i in range(count))]
        known = cache.peek(paths[name])
        blocks = cache.match(paths[parent])[1] + [cache.pool.allocate() for _ in range(count)]
        assert known == len(paths[parent])
        cache.insert(paths[name], blocks)
        cache.pool.free(blocks[known:])
        names |= dict.fromkeys(blocks[known:], name)
    for name in sorted(nodes, key=lambda name: nodes[name][2]):  # use them in the order of their times
        cache.match(paths[name])
    for name, (_, _, _, locks) in nodes.items():
        children = sum(inner[3] for inner in nodes.values() if inner[0] == name)
        for _ in range(locks - children):
            cache.lock(cache.match(paths[name])[0])
    return cache, names


def test_the_order_of_eviction_is_the_engines():
    """Trees whose locks and times are those that requests could have left."""
    for nodes, count in [case for seed in (5, 6, 7) for case in ch08_evict.evict_cases(Draw(seed))]:
        for name, (*_, locks) in nodes.items():
            assert locks >= sum(inner[3] for inner in nodes.values() if inner[0] == name)
        cache, names = planted(nodes)
        gone = []
        for _ in range(count):
            before = {block for node in cache.nodes() for block in node.blocks}
            if not cache.evict(1):
                break
            (block,) = before - {block for node in cache.nodes() for block in node.blocks}
            gone.append(names[block])
        assert gone == ch08_evict.right_evict(nodes, count)
        cache.check()
