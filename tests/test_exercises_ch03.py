"""The exercises of chapter 3: answers right and wrong for `test_exercises.py`; the references are the engine's."""

import torch
from solutions import prose

from minillm.config import ModelConfig
from minillm.kv_cache import ContiguousCache
from minillm.lab.answers import ch03
from minillm.lab.checks import Draw
from minillm.model import Transformer
from minillm.naive import NoCache

CHAPTER = "03_kv_cache"
SKIPPED_RUNS = {"growing-run"}  # this experiment times things: nbmake runs it
BUILT = {"ragged": ch03.ragged_decode, "turn": ch03.next_turn}
BY_NAN = "unseen = keys[:, 0, :end, 0].isnan()"
# `ragged` is case E15, `turn` E6, as a reader would make them.
WRONG_BUILT = [
    ("ragged", [("(1, (k.shape[1], -1))", "(1, (-1, k.shape[1])).transpose(1, 2)"),
                (".flatten(", ".transpose(1, 2).flatten(")],
     "tiling the heads"),
    ("ragged", [(" / q.shape[-1] ** 0.5", "")], "not scaled"),
    ("ragged", [("[rows, :, slots]", "[rows, :, slots + 1]")], "one slot too far"),
    ("ragged", [("[rows, :, slots]", "[rows, :, slots - 1]")], "overwrites the last stored one"),
    ("ragged", [("> slots", ">= slots")], r"lengths\[s\] \+ 1"),
    ("ragged", [(".masked_fill(unseen[:, None, :, None], 0.0)", "")], "zero times NaN is NaN"),
    ("ragged", [("unseen = torch.arange(end) > slots[:, None]", BY_NAN)], "never written need not be NaN"),
    ("ragged", [("end = max(lengths) + 1", "end = keys.shape[2]"),
                ("unseen = torch.arange(end) > slots[:, None]", BY_NAN)],
     "never written need not be NaN"),
    ("ragged", [("end = max(lengths) + 1", "end = keys.shape[2]"), ("> slots", "> end + 0 * slots")], "never written"),
    ("ragged", [("    keys[rows", "    keys, values = keys.clone(), values.clone()\n    keys[rows")], "after the call"),
    ("ragged", [("    keys[rows, :, slots], values[rows, :, slots] = k, v\n", "")], "not stored before attending"),
    ("ragged", [("    keys[rows", "    keys.nan_to_num_(0.0), values.nan_to_num_(0.0)\n    keys[rows")],
     "`keys` after the call: slot 3 of sequence 0 was changed, and only slot 2 may be"),
    ("ragged", [("keys[rows, :, slots], values[rows, :, slots] = k, v", "keys[rows, :, slots] = k")],
     "`values` after the call.*the new values were not"),
    ("ragged", [("keys[rows, :, slots], values[rows, :, slots] = k, v", "values[rows, :, slots] = v")],
     "`keys` after the call.*the new keys were not"),
    ("turn", [("len(prompt) - 1)", "len(prompt))")], "feed at least the last token"),
    ("turn", [("range(keep, len(prompt))", "range(len(prompt) - keep)")], "these start at 0"),
    ("turn", [("range(keep, len(prompt))", "range(keep + 1, len(prompt) + 1)")], "off by one"),
    ("turn", [("range(keep, len(prompt))", "range(len(cached), len(cached) + len(prompt) - keep)")],
     "not where the cache ended"),
    ("turn", [(" and cached[keep] == prompt[keep]", "")], "not the tokens"),
    ("turn", [("return keep", "keep = 0\n    return keep")], "nothing is kept"),
    ("turn", [("return keep", "keep = max(0, keep - 1)\n    return keep")], "one token too few"),
    ("turn", [("return keep", "keep = min(sum(map(int.__eq__, cached, prompt)), len(prompt) - 1)\n    return keep")],
     "hold another past"),
]  # fmt: skip

RIGHT = {ch03.room: (128, 512, 14, 3), ch03.concatenating: (3, 2, "the context is long")}
WRONG_NUMBERS = [  # check, which argument is wrong, the wrong value, what the message says
    (ch03.room, 0, 64, "grouped: .*one of these factors is missing"),
    (ch03.room, 0, 4, "grouped: .*one layer"),
    (ch03.room, 0, 16, "grouped: .*one key/value head; each layer keeps 8$"),
    (ch03.room, 1, 16, "full: .*one key/value head; .*keeps 32$"),
    (ch03.room, 0, 512, "grouped: .*query heads"),
    (ch03.room, 0, 131.072, "grouped: .*kB"),
    (ch03.room, 1, 128, "full: .*more heads"),
    (ch03.room, 2, 15, "sequences: .*a GB is 10⁹ bytes here; or you did not round down"),
    (ch03.room, 2, 7, "sequences: 7 sequences is not right; it is too small$"),
    (ch03.room, 2, 14.8, "sequences: .*round down"),
    (ch03.room, 2, 44, "sequences: .*weights need their place"),
    (ch03.room, 2, 60_577, "sequences: .*a sequence has 4,096"),
    (ch03.room, 3, 4, "sequences_full: .*round down"),
    (ch03.room, 3, 14, "sequences_full: 14 sequences is not right"),
    (ch03.concatenating, 0, 2, "cache_alone: .*once more"),
    *((ch03.concatenating, 0, row, "cache_alone: .*towards which whole number") for row in (2.92, 2.9, 3.1, 1.5)),
    (ch03.concatenating, 0, 1, "cache_alone: .*look at the last rows"),
    (ch03.concatenating, 1, 1.5, "with_weights: .*reads, writes and reads again"),
    (ch03.concatenating, 0, 1000, "cache_alone: .*too large"),
    (ch03.concatenating, 1, 3, "with_weights: .*leaves out the weights"),
    (ch03.concatenating, 1, 4, "with_weights: .*divide"),
    (ch03.concatenating, 2, "the context is short", "conclusion: .*nearly all that is read"),
    (ch03.concatenating, 2, "the model is large", "conclusion: .*smaller part"),
]
MISTAKES = [(ch03.decode_cases, ch03.DECODE_MISTAKES), (ch03.turn_cases, ch03.TURN_MISTAKES)]


def decode_in_a_loop(q, k, v, keys, values, lengths):
    out = []
    for s, n in enumerate(lengths):
        keys[s, :, n], values[s, :, n] = k[s], v[s]
        group = q.shape[1] // k.shape[1]
        seen_k, seen_v = (x[s, :, : n + 1].repeat_interleave(group, dim=0) for x in (keys, values))
        weights = (torch.einsum("hd,htd->ht", q[s], seen_k) / q.shape[-1] ** 0.5).softmax(-1)
        out.append(torch.einsum("ht,htd->hd", weights, seen_v))
    return torch.stack(out)


OTHER_WAYS = [("ragged", decode_in_a_loop)]


def test_a_decode_step_of_the_reference_is_that_of_the_cache():
    draw = Draw(8)
    for q, k, v, keys, values, lengths in ch03.decode_cases(draw):
        heads, kv_heads, size = q.shape[1], k.shape[1], 2 * q.shape[2]
        q, k, v, keys, values = (torch.cat([x, x.flip(-1)], -1) for x in (q, k, v, keys, values))  # an even head size
        config = ModelConfig(11, 8, 1, heads, kv_heads, size, 8, 64)
        cache = ContiguousCache(config, len(lengths), keys.shape[2], dtype=torch.float64)
        cache.k[0], cache.v[0], cache.lengths = keys, values, list(lengths)
        expected = cache.view([1] * len(lengths)).attend(0, q, k, v)
        torch.testing.assert_close(ch03.right_decode(q, k, v, keys, values, lengths), expected)
        torch.testing.assert_close(keys, cache.k[0], equal_nan=True)


def test_the_reference_for_the_next_turn_gives_the_logits_of_a_fresh_start():
    """E6: and one token more kept, or a shifted position, does not."""
    config = ModelConfig(128, 24, 2, 4, 2, 6, 40, 64)
    model = Transformer(config).initialize(3).double().requires_grad_(False)

    def last(tokens, positions, cache):
        return model(torch.tensor(tokens), torch.tensor(positions), cache)[-1]

    for cached, prompt in ch03.turn_cases(Draw(9)):
        keep, tokens, positions = ch03.right_next_turn(cached, prompt)
        expected = last(prompt, range(len(prompt)), NoCache())
        for kept, shift in [
            (keep, 0),
            *([(keep + 1, 0)] if keep + 1 < min(len(cached), len(prompt)) else []),
            (keep, 1),
        ]:
            cache = ContiguousCache(config, dtype=torch.float64)
            if cached:
                last(cached, range(len(cached)), cache)
            cache.truncate(0, kept)
            found = last(prompt[kept:], [p + shift for p in range(kept, len(prompt))], cache)
            right = (kept, shift) == (keep, 0) or (shift and keep == 0)  # turning all positions alike changes nothing
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9) == bool(right)


def test_the_conditions_in_the_text_are_those_that_the_checks_use():
    """B4: a constant typed twice drifts."""
    for phrase in (
        f"{ch03.LAYERS} layers and {ch03.HEADS} query heads that share {ch03.KV_HEADS} key/value heads",
        f"size {ch03.HEAD_DIM}", f"{ch03.WEIGHT_GB} GB in 16 bits", f"card has {ch03.MEMORY_GB} GB",
        f"sequences of {ch03.TOKENS:,} tokens",
    ):  # fmt: skip
        assert phrase in prose(CHAPTER), phrase
