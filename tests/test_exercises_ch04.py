"""The exercises of chapter 4: answers right and wrong for `test_exercises.py`; the references are right."""

import pytest
import torch
from solutions import prose

from minillm import gqa
from minillm.config import ModelConfig
from minillm.lab.answers import ch04
from minillm.model import Transformer
from minillm.naive import NoCache
from minillm.roofline import Device, decode_step

CHAPTER = "04_grouped_query_attention"
BUILT = {"replicate": ch04.replicate, "regroup": ch04.regroup}


def replicate_by_index(qkv, n_heads, n_kv_heads, wanted):
    head_dim = qkv.shape[0] // (n_heads + 2 * n_kv_heads)
    heads = list(range(n_heads))
    for start in (n_heads, n_heads + n_kv_heads):
        heads += [start + j * n_kv_heads // wanted for j in range(wanted)]
    rows = [h * head_dim + d for h in heads for d in range(head_dim)]
    return qkv[rows]


def regroup_in_a_loop(qkv, out, groups, head_dim):
    n = out.shape[1] // head_dim
    blocks = list(qkv.view(3 * n, head_dim, -1))
    order = sum(groups, [])
    made = [blocks[h] for h in order]
    for kind in (1, 2):
        made += [torch.stack([blocks[kind * n + h] for h in group]).mean(0) for group in groups]
    return [torch.cat(made), torch.cat([out[:, h * head_dim : (h + 1) * head_dim] for h in order], dim=1)]


OTHER_WAYS = [("replicate", replicate_by_index), ("regroup", lambda *case: tuple(regroup_in_a_loop(*case)))]
COPY, TILE = "repeat_interleave(copies, dim=0)", "repeat(copies, 1, 1)"
BOTH = f"x.{COPY} for x in (k, v)"
ROWS = f"x.flatten(0, 1).{COPY}.unflatten(0, (-1, head_dim)) for x in (k, v)"
MOVED = "moved = out.unflatten(1, (-1, head_dim))[:, order].flatten(1)"
INVERSE = "inverse = torch.tensor(order).argsort().tolist()"
# Case E15, as a reader would make it.
WRONG_BUILT = [
    ("replicate", [(COPY, TILE)], "the heads are tiled"),
    ("replicate", [(BOTH, f"k.{TILE}, v.{COPY}")], "the keys are tiled"),
    ("replicate", [(BOTH, f"k.{COPY}, v.{TILE}")], "the values are tiled"),
    ("replicate", [(BOTH, ROWS)], "single rows are repeated"),
    ("replicate", [(BOTH, "x for x in (k, v)"), ("(q, k, v)", "(q, *[k, v] * copies)")], "alternate in blocks"),
    ("replicate", [(COPY, f"{COPY} / copies")], "scaled down"),
    ("replicate", [("return torch", "return qkv\n    torch")], "should have shape"),
    ("replicate", [("// (n_heads + 2 * n_kv_heads)", "// n_heads")], "raised RuntimeError"),
    ("regroup", [("(q[order], k, v)", "(q, k, v)")], "the queries are where they were"),
    ("regroup", [(MOVED, "moved = out")], "the columns of `out` are where they were"),
    ("regroup", [("x[order].unflatten", "x.unflatten")], "neighbours are pooled"),
    ("regroup", [(MOVED, f"{INVERSE}\n    {MOVED.replace('order', 'inverse')}")], "`out` are moved the other way"),
    ("regroup", [("(q[order], k, v)", "(q[torch.tensor(order).argsort()], k, v)")], "queries are moved the other way"),
    ("regroup", [(".mean(1)", ".sum(1)")], "added up"),
    ("regroup", [(".mean(1)", "[:, 0]")], "first head of each group"),
    ("regroup", [("(len(groups), -1)).mean(1)", "(-1, len(groups))).mean(0)")], "the result"),
    ("regroup", [("[:, order].flatten(1)", "[:, order].mean(1)")], "should have shape"),
    ("regroup", [(MOVED, "moved = out.unflatten(1, (head_dim, -1))[..., order].flatten(1)")], "the result"),
]  # fmt: skip

KIB = {"OPT-13B": 800, "Mistral 7B": 128, "Yi-34B": 240, "Llama 2 70B": 320, "Falcon-180B": 160}
RIGHT = {ch04.published: (KIB, 4640, 5), ch04.sharing: (20, 6, "arithmetic")}
WRONG_NUMBERS = [  # check, which argument is wrong, the wrong value, what the message says
    (ch04.published, 0, KIB | {"OPT-13B": 400}, r"kib\['OPT-13B'\]: .*one of these factors is missing"),
    (ch04.published, 0, KIB | {"Mistral 7B": 512}, r"kib\['Mistral 7B'\]: .*query heads"),
    *(
        (ch04.published, 0, KIB | {name: kib}, rf"kib\['{name}'\]: .*one key/value head; each layer keeps 8$")
        for name, kib in {"Mistral 7B": 16, "Yi-34B": 30, "Llama 2 70B": 40, "Falcon-180B": 20}.items()
    ),
    (ch04.published, 0, KIB | {"OPT-13B": 20}, "kib.*one layer, or one key/value head of each; there are 40"),
    (ch04.published, 0, KIB | {"Yi-34B": 4}, r"kib\['Yi-34B'\]: .*one layer"),
    (ch04.published, 0, KIB | {"Llama 2 70B": 327.68}, r"kib\['Llama 2 70B'\]: .*kB"),
    (ch04.published, 0, KIB | {"Falcon-180B": 163_840}, r"kib\['Falcon-180B'\]: .*bytes"),
    (ch04.published, 0, KIB | {"Falcon-180B": 320}, r"kib\['Falcon-180B'\]: .*too large"),
    (ch04.published, 0, KIB | {"Falcon-180B": ...}, r"not answered yet: kib\['Falcon-180B'\]"),
    (ch04.published, 0, {"OPT-13B": 800}, "kib: expected a dict with the keys OPT-13B, Mistral 7B"),
    (ch04.published, 0, [800, 128, 240, 320, 160], "kib: expected a dict"),
    (ch04.published, 1, 160, "multi_head: .*as published"),
    (ch04.published, 1, 1280, "multi_head: .*how many query heads share"),
    (ch04.published, 1, 2320, "multi_head: .*factors is missing"),
    (ch04.published, 2, 0.2, "tokens: .*other way round"),
    (ch04.published, 2, 800 / 4640, "tokens: .*as published"),
    (ch04.published, 2, 4, "tokens: 4 tokens is not right"),
    (ch04.sharing, 0, 19, "balance: .*still outweigh"),
    (ch04.sharing, 0, 19.44, "balance: .*round up"),
    (ch04.sharing, 0, 4, "balance: .*20 key/value heads"),
    (ch04.sharing, 0, 78, "balance: .*one key/value head"),
    (ch04.sharing, 0, 39, "balance: .*keys and values are two"),
    (ch04.sharing, 1, 5, "twice: .*1.92 times as fast"),
    (ch04.sharing, 1, 7, "twice: .*weights are larger as well"),
    (ch04.sharing, 1, 4, "twice: .*one key/value head"),
    (ch04.sharing, 1, 20, "twice: .*need not be that large"),
    (ch04.sharing, 1, 6.48, "twice: 6.48 requests is not right"),
    (ch04.sharing, 1, "none", "twice: expected a number of requests"),
    (ch04.sharing, 2, "the cache", "waits_for: .*small part"),
    (ch04.sharing, 2, "the weights", "waits_for: .*two clocks"),
    (ch04.sharing, 2, "overhead", "waits_for: 'overhead' is not one of"),
]
MISTAKES = [(ch04.replicate_cases, ch04.REPLICATE_MISTAKES), (ch04.regroup_cases, ch04.REGROUP_MISTAKES)]


# What the checks take for right, held to the engine.


def scores(config: ModelConfig, weights: dict) -> torch.Tensor:
    model = Transformer(config).double()
    model.load_state_dict(weights)
    ids = torch.arange(9) % config.vocab_size
    with torch.no_grad():
        return model.logits(model(ids, torch.arange(9), NoCache()))


@pytest.mark.parametrize(("heads", "kv_heads", "wanted"), [(4, 2, 4), (12, 3, 6), (6, 1, 3)])
def test_replicated_heads_give_the_logits_of_the_original(heads, kv_heads, wanted):
    """And pooling the copies gives the original back."""
    config = ModelConfig(11, 10, 2, heads, kv_heads, 4, 8, 16)
    model = Transformer(config).initialize(4).double()
    weights, expected = model.state_dict(), scores(config, model.state_dict())
    for name in weights:
        if ".qkv." in name:
            weights[name] = 30 * weights[name]
    expected = scores(config, weights)
    more = {
        name: ch04.right_replicate(w, heads, kv_heads, wanted) if ".qkv." in name else w for name, w in weights.items()
    }
    torch.testing.assert_close(scores(config.with_kv_heads(wanted), more), expected)
    model = Transformer(config.with_kv_heads(wanted)).double()
    model.load_state_dict(more)
    back = gqa.convert(model, kv_heads).state_dict()
    assert all(torch.allclose(back[name], weights[name]) for name in weights)


def test_regrouped_heads_that_agree_give_the_logits_of_the_original_and_neighbours_do_not():
    """The reference moves queries and the columns of `out` together."""
    config = ModelConfig(11, 10, 1, 6, 6, 4, 8, 16)
    weights = Transformer(config).initialize(5).double().state_dict()
    qkv, out = (f"layers.0.attention.{name}.weight" for name in ("qkv", "out"))
    groups = [[4, 1, 3], [0, 5, 2]]
    rows = 30 * weights[qkv].unflatten(0, (3, 6, 4))
    for group in groups:
        rows[1:, group] = rows[1:, group[:1]]
    weights[qkv] = rows.flatten(0, 2)
    expected = scores(config, weights)
    for chosen, same in ((groups, True), ([[0, 1, 2], [3, 4, 5]], False)):
        new = dict(zip((qkv, out), ch04.right_regroup(weights[qkv], weights[out], chosen, 4), strict=True))
        assert torch.allclose(scores(config.with_kv_heads(2), weights | new), expected) == same


def test_the_answers_about_sharing_are_those_of_the_cost_model():
    article, gpu = ch04.MODEL, Device.datasheet("RTX 5090")
    for batch, outweighs in ((19, False), (20, True)):
        step = decode_step(article, gpu, batch, ch04.CONTEXT - 1)
        assert (step.kv_bytes > article.weight_bytes()) == outweighs
    one, full = (decode_step(article.with_kv_heads(n), gpu, 256, 64) for n in (1, 20))
    assert (one.bound, full.bound) == ("compute", "memory")
    assert round(full.bytes / one.bytes) == 3 and round(full.time / one.time, 1) == 1.5
    assert one.weight_bytes / gpu.bandwidth < one.time / 2
    for stored in (ch04.CONTEXT - 1, ch04.CONTEXT):
        gains = [
            decode_step(article.with_kv_heads(20), gpu, n, stored).time / decode_step(article, gpu, n, stored).time
            for n in (5, 6, 20)
        ]
        assert gains[0] < 1.93 and gains[1] > 2.04 and gains[2] < 5


def test_the_conditions_in_the_text_are_those_that_the_checks_use():
    """B4: a constant typed twice drifts."""
    text = prose(CHAPTER)
    for name, shape in ch04.PUBLISHED.items():
        assert f"| {name} | {' | '.join(map(str, shape))} |" in text
    assert f"{ch04.CONTEXT:,} tokens a request" in text
    weights, token = ch04.MODEL.weight_bytes() / 1e6, ch04.MODEL.kv_bytes_per_token() / 1024
    assert f"weights take {weights:.1f} MB, a token {token:.0f} KiB" in text
    layers, heads, kv_heads, size = ch04.PUBLISHED["Falcon-180B"]
    assert (kv_heads, f"{heads} / {kv_heads} times") == (8, "232 / 8 times") and "232 / 8 times" in text
