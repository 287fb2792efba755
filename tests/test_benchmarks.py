"""The decode benchmark: the same work on all sides, and figures that add up. No timing is asserted."""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import chapters, decode, grouped_heads, many_users, peers, record, serving, simulate
from minillm import naive
from minillm.config import ModelConfig
from minillm.lab import tables
from minillm.model import Transformer
from minillm.roofline import Device, decode_step
from minillm.sampling import SamplingParams

CONFIG = ModelConfig(
    vocab_size=97, dim=24, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=10, ffn_dim=40, max_context=64,
    eos_token_ids=(3,),
)  # fmt: skip
LAPTOP = Device.datasheet("laptop")


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG).initialize(8).double().eval().requires_grad_(False)


@pytest.mark.parametrize("engine", [decode.MiniLLM, peers.Transformers])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_engine_makes_the_same_tokens(model, engine, batch):
    """In float64, `naive.generate` says which; a second round starts again from the same cache."""
    prompt = torch.randint(97, (20,), generator=torch.Generator().manual_seed(batch)).tolist()
    expected = naive.generate(model, prompt, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    runner = engine(model)
    runner.fill(prompt, batch, 5)
    for _ in range(2):
        seconds, tokens = runner.decode(5)
        assert tokens == [expected] * batch and seconds > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_llama_cpp_makes_our_tokens(batch):
    """Of the same file: each of its tokens is our best one, or a near tie after its rounding; a second round too."""
    pytest.importorskip("xllamacpp")
    pytest.importorskip("llama_cpp_py_sync")
    try:
        file, model = decode.find_checkpoint("smollm2"), decode.load_model("smollm2", "cpu", "float32")
    except decode.CheckpointError as missing:
        pytest.skip(str(missing))
    prompt = torch.randint(model.config.vocab_size, (30,), generator=torch.Generator().manual_seed(batch)).tolist()
    runner = peers.LlamaCpp(file, threads=1)
    runner.fill(prompt, batch, 20)
    (_, first), (seconds, second) = runner.decode(20), runner.decode(20)
    runner.close()
    made = first[0]
    assert first == second == [made] * batch and len(made) == 21 and seconds > 0
    sequence = torch.tensor(prompt + made[:-1])
    logits = model.logits(model(sequence, torch.arange(len(sequence)), naive.NoCache())[len(prompt) - 1 :])
    chosen = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() < 0.5  # a random token lies about 15 below the best


@pytest.fixture
def steady_machine(monkeypatch):
    """A machine of known rates, so that the bound is a number on paper."""
    monkeypatch.setattr(decode.Device, "measure", lambda *_: LAPTOP)
    monkeypatch.setattr(decode, "measure_bandwidth", lambda *_: (2e9, 1e9))


def test_a_small_run(steady_machine, tmp_path, capsys, monkeypatch):
    """Two batches, with `transformers` beside: every row, ratio and recorded value is there and agrees."""
    monkeypatch.setattr(decode, "load", lambda *_: Transformer(CONFIG).initialize(1).eval().requires_grad_(False))
    file = tmp_path / "here.json"
    arguments = ["--model", "tiny", "--batch", "1", "3", "--context", "short", "--steps", "4", "--rounds", "2"]
    results = decode.main([*arguments, "--device", "cpu", "--peers", "transformers", "--json", str(file)])
    context = CONFIG.max_context - 4 - 2  # 128 do not fit
    assert [(r.model, r.batch, r.context) for r in results] == [("tiny", 1, context), ("tiny", 3, context)]
    values = json.loads(file.read_text())["values"]
    for result in results:
        assert list(result.taken.timings) == ["bound", "minillm", "transformers"]
        cost = decode_step(CONFIG, replace(LAPTOP, bandwidth=2e9), result.batch, context + 1 + 2, "float32")
        assert result.rate("bound")[0] == pytest.approx(result.batch / cost.memory_time)
        assert result.bytes_per_step == dict.fromkeys(result.taken.timings, cost.bytes)
        setting = f"tiny_batch_{result.batch}_context_{context}"
        for engine, timing in result.taken.timings.items():
            assert len(timing.seconds) == 2
            entry = values[f"decode_{engine}_{setting}"]
            assert entry["low"] <= entry["value"] <= entry["high"] and entry["unit"] == "tokens/s"
            assert entry["value"] == pytest.approx(result.batch / timing.median)
        ours, theirs = (result.taken[engine].seconds for engine in ("minillm", "transformers"))
        ratio = values[f"decode_minillm_over_transformers_{setting}"]["value"]
        assert ratio == pytest.approx(statistics.median(b / a for a, b in zip(ours, theirs, strict=True)))
    assert tables.recorded(f"decode_minillm_{setting}", tmp_path)[0]["command"].endswith(f"--json {file}")
    printed = capsys.readouterr().out.splitlines()
    whole = printed[len(printed) - 1 - 6 :]  # the last table: three engines in two settings, and a caption
    assert [line.split("  ")[0] for line in whole[:6:3]] == [f"tiny, 1, {context}", f"tiny, 3, {context}"]
    assert all("×" in line for line in whole[2:6:3]) and "2 rounds of 4 steps" in whole[6]


def test_what_cannot_run_is_said(steady_machine, monkeypatch, capsys):
    """A peer that is not installed, and weights that are not: a word, and the rest goes on."""
    monkeypatch.setattr(decode, "LlamaCpp", missing_package)
    monkeypatch.setattr(decode, "Transformers", missing_package)
    monkeypatch.setattr(decode, "find_checkpoint", lambda name: Path("model.gguf"))
    model = Transformer(CONFIG).initialize(1).requires_grad_(False)
    engines = decode.make_engines("smollm2", model, LAPTOP, decode.PEERS)
    assert list(engines) == ["bound", "minillm"]
    printed = capsys.readouterr().out
    assert "transformers: skipped, No module named" in printed and "llama.cpp: skipped, No module named" in printed
    monkeypatch.undo()
    monkeypatch.setattr(decode, "load_model", missing_weights)
    monkeypatch.setattr(decode.ModelConfig, "preset", lambda name: CONFIG)
    stand_in = decode.load("smollm2", "cpu", None)
    assert stand_in.config is CONFIG and stand_in.dtype == torch.float32
    assert "smollm2: random weights, for it is not installed" in capsys.readouterr().out


def missing_package(*_):
    raise ModuleNotFoundError("No module named 'peer'")


def missing_weights(*_):
    raise decode.CheckpointError("it is not installed")


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--rounds", "0"], ["--batch", "0"], ["--peers", "vllm"]])
def test_bad_arguments_are_refused(arguments, capsys):
    """The message names the option and the value."""
    with pytest.raises(SystemExit):
        decode.main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_no_room_for_a_context(steady_machine, monkeypatch):
    """More steps than the model's context holds."""
    monkeypatch.setattr(decode, "load", lambda *_: Transformer(CONFIG).initialize(1).requires_grad_(False))
    with pytest.raises(ValueError, match="62 steps leave no room for a context: tiny holds 64"):
        decode.run("tiny", [1], [8], [], steps=62)


@pytest.mark.parametrize("benchmark", [chapters, decode, grouped_heads, many_users, serving])
def test_a_place_that_cannot_hold_the_figures_is_refused_at_once(benchmark, tmp_path, capsys, monkeypatch):
    """Every benchmark that writes figures: a folder that is missing, and a folder instead of a file."""
    monkeypatch.setattr(benchmark.record, "write", lambda *_: pytest.fail("it ran"))
    for place, message in (
        (tmp_path / "missing" / "here.json", f"there is no folder {str(tmp_path / 'missing')!r}"),
        (tmp_path, f"{str(tmp_path)!r} is a folder; name a file, such as {tmp_path / 'here.json'}"),
    ):
        with pytest.raises(SystemExit):
            benchmark.main(["--json", str(place)])
        assert f"argument --json: {message}" in capsys.readouterr().err


def test_a_file_may_be_new_or_there_already(tmp_path, monkeypatch):
    """In a folder that exists; the working folder needs no name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("{}")
    for place in ("new.json", "old.json", str(tmp_path / "new.json")):
        assert record.output_file(place) == Path(place)
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder"):
        record.output_file("")


@pytest.mark.parametrize(
    ("benchmark", "arguments"),
    [
        (decode, ["--model", "draft", "nothing"]), (serving, ["--model", "draft", "nothing"]),
        (simulate, ["--model", "draft", "nothing"]), (many_users, ["--model", "nothing"]),
        (grouped_heads, ["--parts", "speed", "--shape", "nothing"]),
    ],
)  # fmt: skip
def test_an_unknown_model_ends_the_command_before_anything_is_measured(benchmark, arguments, capsys, monkeypatch):
    """Also where it is the second: the usage, and which names there are."""
    monkeypatch.setattr(Device, "measure", lambda *_: pytest.fail("it measured"))
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    error = capsys.readouterr().err
    assert error.startswith("usage: python -m benchmarks.") and "nothing" in error.splitlines()[-1]
    assert "draft, post-0.5b, smollm2, tiny, tiny-mha" in error.splitlines()[-1]


def test_a_broken_checkpoint_keeps_its_reason(tmp_path, capsys):
    """No shape stands in for a folder, and it is not called an unknown name."""
    with pytest.raises(SystemExit):
        decode.main(["--model", str(tmp_path)])
    printed = capsys.readouterr()
    assert f"{tmp_path}" in printed.err.splitlines()[-1] and "unknown preset" not in printed.err
    assert "random weights" not in printed.out


@pytest.mark.parametrize(
    ("benchmark", "arguments", "message"),
    [
        (decode, ["--model", "draft", "--steps", "511"], "511 steps leave no room for a context: draft holds 512"),
        (simulate, ["--model", "draft", "--prompt", "512"], "draft holds 512 tokens: too few"),
        (decode, ["--model", "draft", "--device", "abacus"], "unknown device 'abacus'; use 'cpu' or 'cuda'"),
    ],
)
def test_what_the_model_or_the_machine_cannot_do_ends_the_command(benchmark, arguments, message, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert f"error: {message}" in capsys.readouterr().err
