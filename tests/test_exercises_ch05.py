"""The exercises of chapter 5: answers right and wrong for `test_exercises.py`; the references are right."""

from functools import partial

import pytest
from solutions import code, prose

from minillm.lab.answers import ch05
from minillm.lab.checks import CheckFailed, Draw
from minillm.paged_cache import BlockPool, BlockTable

CHAPTER = "05_paged_cache"
BUILT = {"pool": ch05.pool, "beams": ch05.next_beams}


class ListPool:
    """Free blocks in a list: slower, and right."""

    def __init__(self, num_blocks):
        self.order, self.users = list(range(num_blocks)), {}

    def allocate(self):
        if not self.order:
            return None
        self.users[self.order[0]] = 1
        return self.order.pop(0)

    def free(self, blocks):
        for block in blocks[::-1]:
            self.users[block] -= 1
            self.order += [block] * (self.users[block] == 0)

    def fork(self, blocks):
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1
            if block in self.order:
                self.order.remove(block)

    def num_free(self):
        return len(self.order)


def beams_by_group(tables, parents, length, size, users, free):
    """Counts once at the end; the first child of a block keeps it, the later ones copy; takes free blocks in order."""
    new, copies, kept = [list(tables[p]) for p in parents], [], set()
    spare = sorted(set(range(len(users))) - {block for table in [*tables, *new] for block in table})
    for table in new:
        if length % size == 0:
            table.append(spare.pop(0))
        elif table[-1] in kept:
            copies.append((table[-1], spare[0]))
            table[-1] = spare.pop(0)
        else:
            kept.add(table[-1])
    for block in range(len(users)):
        users[block] = sum(table.count(block) for table in new)
    free[:] = [block for block in range(len(users)) if not users[block]]
    return new, copies


def beams_in_lists(*case):
    """Lists all the way: `[tables, copies]`, and each pair a list."""
    new, copies = beams_by_group(*case)
    return [tuple(table) for table in new], [list(pair) for pair in copies]


OTHER_WAYS = [
    ("pool", ListPool), ("beams", beams_by_group), ("beams", beams_in_lists),
    ("beams", lambda *case: list(beams_by_group(*case))),
]  # fmt: skip
DROP = "            users[block] -= 1\n            if users[block] == 0:\n                free.append(block)\n"
POP, ALONE = "            self.queue.pop(block, None)\n", "        if not self.queue:\n"
SKIPPING = (
    "        while self.queue and self.users[next(iter(self.queue))]:\n"
    f"            del self.queue[next(iter(self.queue))]\n{ALONE}"
)
CHAINED = "copies.append((copies[-1][1] if copies and copies[-1][0] == source else source, target))"
# Case E1, as a reader would make it.
WRONG_BUILT = [
    ("pool", [("next(iter(self.queue))", "list(self.queue)[-1]")], "free for longest"),
    ("pool", [("next(iter(self.queue))", "min(self.queue)")], r"allocate\(\) should give"),
    ("pool", [("reversed(blocks)", "blocks")], "from the last to the first"),
    ("pool", [("if self.users[block] == 0:", "if True:")], "last user has freed it"),
    ("pool", [("            self.queue.pop(block, None)\n", "")], "take it out of the queue"),
    ("pool", [("self.users[block] += 1", "self.users[block] = 1")], r"num_free\(\) should be"),
    ("pool", [("        self.users[block] = 1\n", "")], "num_free|should give"),
    (
        "pool",
        [("        if not self.queue:\n            return None\n", "")],
        r"raised StopIteration: .*after p = Pool\(2\)",
    ),
    ("pool", [("return len(self.queue)", "return sum(self.users)")], r"num_free\(\) should be"),
    ("pool", [("return len(self.queue)", "return sum(not n for n in self.users) + 1")], r"num_free\(\) should be"),
    (
        "pool",
        [(POP, ""), (ALONE, SKIPPING), ("return len(self.queue)", "return self.users.count(0)")],
        r"p = Pool\(3\); \[p.allocate\(\) for _ in range\(2\)\]; p.free\(\[0\]\); p.fork\(\[0\]\).*keeps its old place",
    ),
    ("pool", [("reversed(blocks)", "sorted(blocks, reverse=True)")], "by their numbers"),
    ("beams", [("copies.append((source, target))", CHAINED)], "copies are made at once"),
    ("beams", [("list(tables[parent])", "tables[parent]")], "."),
    ("beams", [("        elif users[table[-1]] > 1:", "        elif False:")], "which another beam uses too"),
    ("beams", [("        elif users[table[-1]] > 1:", "        else:")], "copies where .* will do"),
    ("beams", [("            copies.append((source, target))\n", "")], "no longer reads token"),
    ("beams", [("copies.append((source, target))", "copies.append((target, source))")], "no longer reads token"),
    ("beams", [("            users[source] -= 1\n", "")], "copies where|new beams use the block"),
    ("beams", [("            users[target] = 1\n", "")], "new beams use the block"),
    ("beams", [(DROP, "            pass\n")], "copies where|new beams use the block"),
    ("beams", [("                free.append(block)\n", "                pass\n")], "free should hold"),
    ("beams", [("if length % size == 0:", "if length % size == 1:")], "it needs|would write into block"),
    (
        "beams",
        [("            table.append(free.pop())\n", "            table.append(free[-1])\n")],
        "which another beam",
    ),
    ("beams", [("tables[parent]) for parent in parents", "table) for table in tables")], "no longer reads token"),
    ("beams", [("return new_tables, copies", "return new_tables")], "two lists"),
    (
        "beams",
        [("return new_tables, copies", "return new_tables, [tuple(pair) + (0,) for pair in copies]")],
        "as pairs",
    ),
]
RIGHT = {
    ch05.waste: (15.5, 4.91, 85.4, 16),
    ch05.block_size: (142.5, 128, 8, "short answers need small blocks"),
}
WRONG_NUMBERS = [  # check, which argument is wrong, the wrong value, what the message says
    (ch05.waste, 0, 16, "last: .*at least one token"),
    (ch05.waste, 0, 31, "last: .*that is the most"),
    (ch05.waste, 0, 32, "last: .*not have been handed out"),
    (ch05.waste, 1, 5.17, "paged: .*all that is handed out"),
    (ch05.waste, 1, 0.0491, "paged: .*percent are asked for"),
    (ch05.waste, 1, 9.37, "paged: .*worst last block"),
    (ch05.waste, 1, 95.1, "paged: .*part in use"),
    (ch05.waste, 2, 14.6, "reserved: .*part in use"),
    (ch05.waste, 2, 0.854, "reserved: .*percent"),
    (ch05.waste, 1, 5, "paged: 5 % is not right; it is too large$"),
    *((ch05.waste, 2, percent, f"reserved: {percent} % is not right; it is too ") for percent in (84.6, 85, 86.1)),
    (ch05.waste, 3, 32, "largest: .*4.9%"),
    (ch05.waste, 3, 8, "largest: .*stay below"),
    (ch05.waste, 3, 25, "largest: .*no power of two"),
    (ch05.block_size, 0, 150, "mean: .*7.5 of them hold no token"),
    (ch05.block_size, 0, 285, "mean: .*worst last block"),
    (ch05.block_size, 0, 300, "mean: .*worst last block"),
    (ch05.block_size, 0, 80, "mean: 80 tokens is not right; it is too small$"),
    (ch05.block_size, 1, 16, "at250: .*every last block is filled alike"),
    (ch05.block_size, 1, 8, "at250: .*that is for 258 tokens"),
    (ch05.block_size, 1, 64, "at250: .*next size"),
    (ch05.block_size, 1, 256, "at250: .*ends at 128"),
    (ch05.block_size, 2, 16, "at258: .*every last block is filled alike"),
    (ch05.block_size, 2, 128, "at258: .*that is for 250 tokens"),
    (ch05.block_size, 2, 4, "at258: .*next size"),
    (ch05.block_size, 3, "long answers need small blocks", "conclusion: .*weigh less"),
    (ch05.block_size, 3, "the length does not matter", "conclusion: .*compare the first two columns"),
]
SLIPS = {slip: ch05.with_script(partial(ch05.RightPool, slip=slip)) for slip in ch05.POOL_SLIPS}
MISTAKES = [(ch05.pool_cases, SLIPS)]


# What the checks take for right, held to the engine.


def test_beams_of_the_reference_share_and_copy_as_block_tables_do():
    """The same step with `BlockTable`: as many blocks in use, as many copies, the same counts."""
    for tables, parents, length, size, users, free in ch05.beam_cases(Draw(3)):
        pool = BlockPool(len(users), size)
        pool._ref_counts, pool._free = list(users), list(free)
        old = [BlockTable(pool) for _ in tables]
        for table, blocks in zip(old, tables, strict=True):
            table.blocks = list(blocks)
        pool.check(old)
        new = [old[parent].fork() for parent in parents]
        for table in old:
            table.truncate(0)
        copies = [pair for table in new for pair in table.prepare(length, length + 1)]
        pool.check(new)
        _, expected = ch05.right_beams(tables, parents, length, size, users, free)
        assert len(copies) == len(expected) and sorted(users) == sorted(pool._ref_counts)
        assert len(free) == pool.num_free


def test_the_pool_of_the_reference_counts_as_the_engine_does():
    """Which block is given away first differs; how many are free does not, where nothing free is forked."""
    for num_blocks, script in ch05.pool_cases(Draw(4)):
        ours, theirs, same = ch05.RightPool(num_blocks), BlockPool(num_blocks, 1), {}
        for name, *arguments in script:
            if name == "fork" and any(not ours.users[block] for block in arguments[0]):
                break
            given = getattr(ours, name)(*arguments)
            if name == "allocate":
                if given is not None:
                    same[given] = theirs.allocate()
                continue
            getattr(theirs, name)([same[block] for block in arguments[0]])
            assert ours.num_free() == theirs.num_free


def test_the_experiment_gives_the_answers_of_the_formula():
    """Sequences of 1 to 159 and 1 to 999 tokens, and those that waste 5 percent; and what 250 tokens each leave."""
    for tokens in (ch05.SHORT, ch05.LONG):
        for size in ch05.SIZES:
            lengths = range(1, 2 * tokens)
            held = sum(-(-length // size) * size for length in lengths)
            found = 100 * (1 - sum(lengths) / held)
            expected = ch05.waste_of(tokens, size)
            assert abs(found - expected) < 0.08 * expected + 1e-9
            assert (found < ch05.ALLOWED) == (size <= ch05.largest_size(tokens, ch05.ALLOWED))
    for tokens, too_much in ((138, True), (143, True), (144, False), (148, False)):
        lengths = range(1, 2 * tokens)
        share = 100 * (1 - sum(lengths) / sum(-(-n // ch05.PAGE) * ch05.PAGE for n in lengths))
        assert (share > ch05.ALLOWED) == too_much and abs(share - ch05.ALLOWED) < 0.21
    for tokens, sizes in ((250, {8: 2.3, 128: 2.3}), (258, {8: 2.3, 16: 5.1, 128: 32.8})):
        for size, percent in sizes.items():
            pool = BlockPool(100, size)
            table = BlockTable(pool)
            table.prepare(0, tokens)
            held = len(table.blocks) * size
            assert round(100 * (1 - tokens / held), 1) == percent == round(ch05.waste_alike(tokens, size), 1)


def test_the_conditions_in_the_text_are_those_that_the_checks_use():
    """B4: a constant typed twice drifts."""
    text = prose(CHAPTER)
    for phrase in (
        f"hold {ch05.TOKENS} tokens on average", f"blocks of {ch05.BLOCK} slots", f"reservation of {ch05.LIMIT} slots",
        f"below {ch05.MOST} percent", f"{ch05.SHORT} tokens on average and {ch05.LONG} on average",
        f"below {ch05.ALLOWED} percent", f"blocks of {ch05.PAGE} waste more than {ch05.ALLOWED} percent",
        f"every sequence holds {ch05.ALIKE[0]} tokens", f"with {ch05.ALIKE[1]} tokens",
    ):  # fmt: skip
        assert phrase in text, phrase
    source = code("solutions", CHAPTER)["sizes-run"]
    assert str(ch05.SIZES) in source
    assert f"randint(1, {2 * ch05.SHORT - 1})" in source and f"randint(1, {2 * ch05.LONG - 1})" in source


def test_a_pool_that_is_made_already_is_no_class():
    with pytest.raises(CheckFailed, match="^pool: expected a class, got <.*ListPool object"):
        ch05.pool(ListPool(4))


def test_a_failing_script_is_shown_as_code_that_fails_again():
    """Up to the call that went wrong, however long the script is."""

    class Forgetful(ListPool):
        def allocate(self):
            self.calls = getattr(self, "calls", 0) + 1
            return super().allocate() if self.calls < 12 else 99

    with pytest.raises(CheckFailed) as failed:
        ch05.pool(Forgetful)
    line = str(failed.value).splitlines()[1].strip()
    *steps, last = line.split("; ")
    namespace = {"Pool": Forgetful}
    exec("; ".join(steps), namespace)
    assert 99 in (given := eval(last, namespace), given[-1] if isinstance(given, list) else None)
