"""The training script on a text of its own: it learns, resumes exactly, and its measures are what they say."""

import math
import random
import struct
import zlib
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from minillm.checkpoints import corpus, train
from minillm.config import ModelConfig
from minillm.model import Transformer
from minillm.weights import load_model

CONFIG = ModelConfig(
    vocab_size=4096, dim=24, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=12, ffn_dim=32, max_context=16,
    eos_token_ids=(0,),
)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with one text of 40 chapters, in a small language that can be learned."""
    rng = random.Random(0)
    words = ["the", "cat", "saw", "a", "dog", "and", "ran", "home"]
    lines = []
    for number in range(40):
        lines += [f"CHAPTER {number + 1}", ""]
        lines += [" ".join(words[(i + rng.randrange(2)) % 8] for i in range(12)) for _ in range(12)] + [""]
    folder = tmp_path_factory.mktemp("text")
    (folder / "one.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def ids(text, tmp_path_factory):
    """The prepared runs of ids."""
    return train.prepare(str(text), tmp_path_factory.mktemp("out"))[1]


def test_training_learns(ids, tmp_path):
    """Held-out loss ends well below its start."""
    recipe = train.Recipe(steps=60, warmup=5, learning_rate=1e-2, dropout=0.1)
    before = train.cross_entropy(Transformer(CONFIG).initialize(0), ids["validation"], 16)
    model = train.train(CONFIG, recipe, ids, tmp_path)
    assert train.cross_entropy(model, ids["validation"], 16) < 0.6 * before


def test_an_interrupted_run_ends_as_one_that_ran_through(ids, tmp_path, monkeypatch):
    """The state holds all that matters: weights after a break equal those without, bit for bit."""
    recipe = train.Recipe(steps=8, warmup=2)
    through = train.train(CONFIG, recipe, ids, tmp_path / "through", every=4)

    def interrupted(*arguments, calls=[]):  # noqa: B006
        calls.append(1)
        if len(calls) > 6:
            raise KeyboardInterrupt
        return loss_of(*arguments)

    loss_of = train.loss_of
    monkeypatch.setattr(train, "loss_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.train(CONFIG, recipe, ids, tmp_path / "broken", every=4)
    monkeypatch.setattr(train, "loss_of", loss_of)
    resumed = train.train(CONFIG, recipe, ids, tmp_path / "broken", every=4)
    for a, b in zip(through.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_one_command_trains_publishes_and_writes_the_card(text, tmp_path, monkeypatch):
    """every model and the card in turn; what is published loads again, the card holds measured figures."""
    config = replace(CONFIG, max_context=160)  # room for the card's sample
    small = {"tiny": config, "tiny-mha": config, "draft": config}
    monkeypatch.setattr(train, "RECIPES", {name: train.Recipe(steps=4, warmup=1, distill=0.5) for name in small})
    monkeypatch.setattr(ModelConfig, "preset", staticmethod(small.get))
    for what in ("tiny", "tiny-mha", "draft", "card"):
        train.main([what, "--text", str(text), "--out", str(tmp_path), "--work", str(tmp_path / "work")])
    assert load_model(tmp_path / "tiny", "cpu", "float32").config == config
    card = (tmp_path / "README.md").read_text()
    assert "bits per byte" in card and "{" not in card and "nan" not in card


def test_acceptance_rate_is_one_for_a_perfect_draft_and_the_overlap_otherwise(ids):
    """Against the sum written out for two fixed distributions."""
    a, b = (Transformer(CONFIG).initialize(seed) for seed in (1, 2))
    assert train.acceptance_rate(a, a, ids["test"][:64], 16) == pytest.approx(1, abs=1e-6)
    with torch.no_grad():
        p, q = (train.run(m, ids["test"][:64], 16).softmax(-1) for m in (a, b))
    expected = 1 - 0.5 * (p - q).abs().sum(-1).mean().item()  # one minus the total variation distance
    assert train.acceptance_rate(a, b, ids["test"][:64], 16) == pytest.approx(expected, abs=1e-5)


def test_cross_entropy_scores_each_window_alone(ids):
    """Equal to scoring window by window with the plain formula."""
    model, run = Transformer(CONFIG).initialize(3), ids["test"][:50]
    losses = []
    with torch.no_grad():
        for start in (0, 16, 32):
            logits = train.run(model, run[start : start + 16], 16)
            losses.append(F.cross_entropy(logits, run[start + 1 : start + 17]).item())
    assert train.cross_entropy(model, run, 16) == pytest.approx(sum(losses) / 3, rel=1e-6)


def test_learning_rate_warms_up_and_ends_at_zero():
    """Linear, then a cosine."""
    recipe = train.Recipe(steps=100, warmup=10, learning_rate=1.0)
    assert recipe.learning_rate_at(0) == pytest.approx(0.1)
    assert recipe.learning_rate_at(9) == recipe.learning_rate_at(10) == pytest.approx(1.0)
    assert recipe.learning_rate_at(55) == pytest.approx(0.5)
    assert recipe.learning_rate_at(100) == pytest.approx(0, abs=1e-12)


def test_chapters_are_unwrapped():
    """Lines of a paragraph join, paragraphs stay apart, a heading opens a chapter, front matter too short goes."""
    body = ["A line", "that  wraps.", "", "Another paragraph. " * 40]
    got = corpus.chapters(["TITLE", "", "Chapter 1", "", *body, "", "Chapter 2", "", *body])
    assert [c[:45] for c in got] == [f"Chapter {n}\n\nA line that wraps.\n\nAnother paragr" for n in (1, 2)]


def test_every_twentieth_chapter_is_held_out(text):
    """Two of 40 for validation, two for test, none in two places."""
    parts = corpus.split(text)
    assert {name: len(chapters) for name, chapters in parts.items()} == {"train": 36, "validation": 2, "test": 2}
    assert len(set(sum(parts.values(), []))) == 40


def test_r_data_is_decoded(tmp_path):
    """Two records of the lazy-load form, written here by its rules, accents included."""

    def record(strings):
        body = b"X\n" + struct.pack(">iii", 3, 0x40201, 0x30500) + struct.pack(">i", 5) + b"UTF-8"
        body += struct.pack(">ii", 16, len(strings))
        for s in strings:
            body += struct.pack(">ii", 0x40009, len(s.encode())) + s.encode()
        return struct.pack(">I", len(body)) + zlib.compress(body)

    file = tmp_path / "Rdata.rdb"
    file.write_bytes(record(["one", "", "dîner"]) + record(["two"]))
    assert corpus.read_novels(file) == [["one", "", "dîner"], ["two"]]
    with pytest.raises(ValueError, match="neither a folder"):
        corpus.read_novels(tmp_path)


@pytest.mark.parametrize("name", train.RECIPES)
def test_shipped_models_are_what_the_card_says(name):
    """The shape of the preset, and held-out bits per byte as the card prints them."""
    model = load_model(name, "cpu", "float32")
    assert model.config == ModelConfig.preset(name)
    tokenizer = train.Tokenizer.from_file(str(train.HERE / "tokenizer.json"))
    text = (train.HERE / "test.txt").read_text(encoding="utf-8")
    chunk = tokenizer.encode(text).ids[: 20 * 512 + 1]
    num_bytes = len(tokenizer.decode(chunk).encode())
    bits = train.cross_entropy(model, torch.tensor(chunk), 512) / math.log(2) * len(chunk) / num_bytes
    row = next(line for line in (train.HERE / "README.md").read_text().splitlines() if "bits per byte, test" in line)
    printed = float(row.split("**")[1 + 2 * list(train.RECIPES).index(name)])
    assert bits == pytest.approx(printed, rel=0.06)  # a part of the test chapters stands for all
