"""The serving benchmark: the same tokens on all sides, and figures that add up. No timing is asserted."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import serving
from minillm import naive
from minillm.config import EngineConfig, ModelConfig
from minillm.model import Transformer
from minillm.roofline import Device, step_cost
from minillm.runner import ModelRunner

CONFIG = ModelConfig(
    vocab_size=97, dim=24, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=10, ffn_dim=40, max_context=64,
    eos_token_ids=(3,),
)  # fmt: skip
LAPTOP = Device.datasheet("laptop")
SETTINGS = EngineConfig(block_size=16, num_blocks=12, max_batch_size=3, token_budget=20)


@pytest.fixture(scope="module")
def model():
    made = Transformer(CONFIG).initialize(8).double().eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter *= 8
    return made


@pytest.fixture(scope="module")
def requests():
    return serving.varied_lengths(8, (2, 20), 24, 97, seed=4)


def engine_of(kind: str, model: Transformer):
    if kind in (serving.OURS, serving.STATIC):
        batching = "static" if kind == serving.STATIC else "continuous"
        return serving.Served(ModelRunner(model, SETTINGS), replace(SETTINGS, batching=batching))
    pytest.importorskip("transformers")
    return serving.PaddedBatches(model, 3) if kind == serving.PEER_STATIC else serving.PeerContinuous(model, SETTINGS)


@pytest.mark.parametrize("kind", [serving.OURS, serving.STATIC, *serving.PEERS])
def test_every_engine_makes_the_same_tokens(model, requests, kind):
    """In float64, `naive.generate` says which; a second round gives them again."""
    expected = [naive.generate(model, list(r.prompt_ids), r.params) for r in requests]
    assert len({tuple(tokens) for tokens in expected}) == 8
    engine = engine_of(kind, model)
    try:
        for _ in range(2):
            seconds, outputs = engine.serve(requests)
            assert outputs == expected and seconds > 0
            serving.check_outputs(kind, outputs, requests)
    finally:
        if kind == serving.PEER:
            engine.close()


def test_lengths_vary_widely():
    """Prompts of 16 to 128 tokens, outputs of 4 to 160, more short than long; the seed says which."""
    drawn = serving.varied_lengths(400, (16, 128), 160, 997, seed=1)
    prompts, outputs = ([len(r.prompt_ids) for r in drawn], [r.params.max_tokens for r in drawn])
    assert (min(prompts), max(prompts)) == (16, 128) and 4 <= min(outputs) <= 6 and 140 < max(outputs) <= 160
    assert sum(n < 40 for n in outputs) > 200 and all(r.params.ignore_eos for r in drawn)
    assert drawn == serving.varied_lengths(400, (16, 128), 160, 997, seed=1)
    assert drawn != serving.varied_lengths(400, (16, 128), 160, 997, seed=2)


def test_the_ideal_is_the_sum_of_its_steps(requests):
    """Two requests in a batch of one, by hand: a prompt, then a decode for each further token."""
    pair = [replace(r, params=replace(r.params, max_tokens=n)) for r, n in zip(requests[:2], (3, 2), strict=True)]
    alone = EngineConfig(block_size=16, num_blocks=4, max_batch_size=1, token_budget=64)
    ideal = serving.Ideal(CONFIG, LAPTOP, torch.device("cpu"), torch.float32, alone).simulate(pair, alone)
    first, second = (len(r.prompt_ids) for r in pair)
    steps = [(first, 0), (1, first), (1, first + 1), (second, 0), (1, second)]
    costs = [step_cost(CONFIG, LAPTOP, [step], "float32") for step in steps]
    assert ideal.now() == pytest.approx(sum(max(cost.memory_time, cost.compute_time) for cost in costs))
    assert ideal.moved == pytest.approx(sum(cost.bytes for cost in costs))


@pytest.fixture
def steady_machine(monkeypatch):
    """A machine of known rates, so that the ideal is a number on paper."""
    monkeypatch.setattr(serving.Device, "measure", lambda *_: LAPTOP)
    monkeypatch.setattr(serving, "measure_bandwidth", lambda *_: (2e9, 1e9))
    monkeypatch.setattr(serving, "load", lambda *_: Transformer(CONFIG).initialize(1).requires_grad_(False))


SHORT = ["--model", "tiny", "--requests", "5", "--batch", "2", "--budget", "16", "--prompts", "2", "9"]
SHORT += ["--outputs", "12", "--rounds", "2", "--device", "cpu"]


def test_a_small_run(steady_machine, tmp_path, capsys):
    """Every engine has its row, and the recorded values agree with it."""
    pytest.importorskip("transformers")
    file = tmp_path / "here.json"
    [result] = serving.main([*SHORT, "--peers", "transformers static", "--json", str(file)])
    names = [serving.IDEAL, serving.OURS, serving.STATIC, serving.PEER_STATIC]
    assert list(result.taken.timings) == names
    asked = serving.varied_lengths(5, (2, 9), 12, 97)
    assert result.tokens == sum(r.params.max_tokens for r in asked)
    values = json.loads(file.read_text())["values"]
    for name in names:
        timing, key = result.taken[name], f"{name.replace(' ', '_')}_tiny"
        assert len(timing.seconds) == 2
        entry = values[f"serving_{key}"]
        assert entry["low"] <= entry["value"] <= entry["high"] and entry["unit"] == "tokens/s"
        assert entry["value"] == pytest.approx(result.tokens / timing.median)
        assert (f"serving_minillm_over_{key}" in values) == (name != serving.OURS)
    for name in ("minillm", "minillm_static"):
        assert 0 < values[f"serving_scheduler_share_{name}_tiny"]["value"] < 1
    assert result.moved[serving.IDEAL] == result.moved[serving.OURS] < result.moved[serving.STATIC]
    assert json.loads(file.read_text())["command"].endswith(f"--json {file}")
    printed = capsys.readouterr().out
    assert "batches of 2. Medians of 2 rounds" in printed and printed.count("×") == 3


def test_a_peer_that_fails_leaves_the_race(steady_machine, monkeypatch, capsys):
    """A word, and the rest goes on: one is not installed, another gives too few tokens."""

    class Broken:
        def __init__(self, *_):
            pass

        def serve(self, requests):
            return 1.0, [[0]] * len(requests)

        def close(self):
            pass

    def missing(*_):
        raise ModuleNotFoundError("No module named 'peer'")

    monkeypatch.setattr(serving, "PaddedBatches", missing)
    monkeypatch.setattr(serving, "PeerContinuous", Broken)
    [result] = serving.main([*SHORT, "--rounds", "1"])
    assert list(result.taken.timings) == [serving.IDEAL, serving.OURS, serving.STATIC]
    printed = capsys.readouterr().out
    assert "transformers static: skipped, ModuleNotFoundError: No module named 'peer'" in printed
    assert "transformers continuous: skipped, RuntimeError: outputs of [1, 1, 1, 1] tokens instead of [2" in printed


def test_our_own_fault_is_not_skipped(steady_machine, monkeypatch):
    """If minillm gives too few tokens, the run fails."""
    monkeypatch.setattr(serving.Served, "serve", lambda self, requests: (1.0, [[]] * len(requests)))
    with pytest.raises(RuntimeError, match=r"outputs of \[0, 0, 0, 0\] tokens"):
        serving.main([*SHORT, "--peers"])


@pytest.mark.parametrize("lengths", [["300", "600"], ["500", "501"], ["600", "600"]])
def test_requests_that_the_model_cannot_hold_are_refused(lengths, capsys, monkeypatch):
    """Before anything is measured, with the engine's own reason; no engine serves a part of them."""
    monkeypatch.setattr(serving, "make_engines", lambda *_: pytest.fail("it went on"))
    monkeypatch.setattr(serving.Device, "measure", lambda *_: pytest.fail("it measured"))
    with pytest.raises(SystemExit):
        serving.main(["--model", "draft", "--requests", "8", "--prompts", *lengths])
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--prompts and --outputs draw what draft cannot hold" in error
    assert "exceed the model's context of 512" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rounds", "0"], ["--requests", "0"], ["--batch", "0"], ["--outputs", "4"], ["--prompts", "9", "2"],
        ["--budget", "3"], ["--peers", "vllm"], ["--seed", "-1"],
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(arguments, capsys):
    """The message names the option."""
    with pytest.raises(SystemExit):
        serving.main(arguments)
    assert arguments[0] in capsys.readouterr().err
