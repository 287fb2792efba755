"""The benchmark of grouped heads: fair on all sides, and figures that add up. No timing is asserted."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import grouped_heads
from minillm import gqa
from minillm.checkpoints import train
from minillm.config import ModelConfig
from minillm.lab import tables
from minillm.model import Transformer
from minillm.roofline import Device, decode_step

CONFIG = ModelConfig(
    vocab_size=4096, dim=16, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=6, ffn_dim=24, max_context=48
)
LAPTOP = Device.datasheet("laptop")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A small multi-head model, a text to train on, and a machine of known rates."""
    model = Transformer(CONFIG).initialize(3).eval().requires_grad_(False)
    monkeypatch.setattr(grouped_heads, "load_model", lambda *_: model)
    monkeypatch.setattr(grouped_heads.Device, "measure", lambda *_: LAPTOP)
    monkeypatch.setattr(ModelConfig, "preset", staticmethod(lambda name: CONFIG.with_kv_heads(2)))
    monkeypatch.setattr(grouped_heads, "held_out", lambda tokenizer: short(held_out(tokenizer)))
    chapter = "\n".join(["CHAPTER 1", "", *["It was a truth that nobody in the house had thought of. "] * 40, ""])
    (tmp_path / "novel.txt").write_text("\n".join([chapter] * 3))
    return model, tmp_path


held_out = grouped_heads.held_out


def short(ids: dict) -> dict:
    return {name: run[:400] for name, run in ids.items()}


def test_the_held_out_texts_are_those_that_ship(small):
    """Two different texts, and their ids spell them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(train.HERE / "tokenizer.json"))
    ids = held_out(tokenizer)
    for name, run in ids.items():
        assert len(run) > 30_000
        assert tokenizer.decode(run.tolist()) == (train.HERE / f"{name}.txt").read_text(encoding="utf-8")
    assert not torch.equal(ids["validation"][:400], ids["test"][:400])


def test_every_number_of_heads_is_trained_alike_and_recorded(small, capsys):
    """Also the unconverted one. What is recorded can be measured again, and names no folder of this machine."""
    model, folder = small
    file = folder / "here.json"
    arguments = ["--text", str(folder), "--heads", "4", "1", "--steps", "5", "--rates", "1e-3", "1e-2"]
    values = grouped_heads.main([*arguments, "--model", str(folder / "tiny-mha"), "--json", str(file)])
    record = json.loads(file.read_text())
    assert record["values"] == values and str(folder) not in record["command"]
    assert "--model tiny-mha --steps 5 --heads 4 1 --rates 0.001 0.01" in record["command"]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(train.HERE / "tokenizer.json"))
    ids = short(held_out(tokenizer)) | {"train": train.encode(tokenizer, grouped_heads.corpus.split(folder)["train"])}
    for heads in (4, 1):
        converted = gqa.convert(model, heads)
        rate = values[f"gqa_learning_rate_{heads}_heads"]["value"]
        trained = {r: gqa.uptrain(converted, ids["train"], 5, r) for r in (1e-3, 1e-2)}
        on_validation = {r: train.cross_entropy(m, ids["validation"], 48) for r, m in trained.items()}
        assert rate == min(on_validation, key=on_validation.get), "chosen on the validation text"
        for split in ("validation", "test"):
            for step, m in ((0, converted), (5, trained[rate])):
                entry = tables.recorded(f"gqa_{split}_loss_{heads}_heads_step_{step}", folder)[0]
                assert entry["value"] == pytest.approx(train.cross_entropy(m, ids[split], 48), abs=1e-4)
        curve = [key for key in values if key.startswith(f"gqa_validation_loss_{heads}_heads")]
        assert [key.rpartition("_")[2] for key in curve] == ["0", "1", "2", "3", "4", "5"]
    last = capsys.readouterr().out.splitlines()[-3:-1]
    assert [line.split()[:2] for line in last] == [["4", "96"], ["1", "24"]], "2 * heads * 6 * 2 bytes"


def test_speed_is_measured_at_every_number_of_heads(small, capsys):
    _, folder = small
    file = folder / "speed.json"
    arguments = ["--parts", "speed", "--batch", "1", "2", "--context", "5", "20", "--rounds", "2", "--device", "cpu"]
    values = grouped_heads.main([*arguments, "--json", str(file)])
    name = "smollm2_decode_rate_{}_heads_batch_{}_context_{}"
    keys = [name.format(n, b, c) for c in (5, 20) for b in (1, 2) for n in (4, 2, 1)]
    assert list(values) == keys
    assert all(0 < v["low"] <= v["value"] <= v["high"] and v["unit"] == "tokens/s" for v in values.values())
    four, one = (decode_step(CONFIG.with_kv_heads(n), LAPTOP, 2, 20 + 8, "float32").memory_time for n in (4, 1))
    assert f"{four / one:.2f}×" in capsys.readouterr().out.splitlines()[-2]


def test_the_share_of_the_steps_is_the_papers():
    """5% of the steps that the model was trained for."""
    _, asked = grouped_heads.parse(["--text", "x"])
    assert asked.steps == 75 == 0.05 * train.RECIPES["tiny-mha"].steps
    assert asked.heads == [8, 4, 2, 1] and asked.text == Path("x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "--text"), (["--text", "x", "--steps", "0"], "--steps"), (["--rounds", "0", "--text", "x"], "--rounds")],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        grouped_heads.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing"], "missing is neither a folder with .txt files"),
        (["--text", "FOLDER", "--heads", "4", "3"], "4 key/value heads cannot form 3 equal groups; use one of 1, 2, 4"),
        (["--parts", "speed", "--context", "5", "32"], "--context 32 is too long for smollm2, which has room for 31"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(small, arguments, message, capsys, monkeypatch):
    for part in ("measure_quality", "measure_speed"):
        monkeypatch.setattr(grouped_heads, part, lambda *_: pytest.fail("it measured"))
    with pytest.raises(SystemExit):
        grouped_heads.main([str(small[1]) if word == "FOLDER" else word for word in arguments])
    assert f"error: {message}" in capsys.readouterr().err


def test_the_longest_context_that_is_taken_can_be_timed(small):
    """One token more is refused, see above."""
    assert grouped_heads.main(
        ["--parts", "speed", "--batch", "1", "--context", "31", "--rounds", "1", "--device", "cpu"]
    )
