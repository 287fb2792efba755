"""The benchmark of stalls and shared starts runs on the smallest model, and its counts are right."""

import json
from dataclasses import replace

import pytest

from benchmarks import many_users
from minillm.config import EngineConfig, ModelConfig
from minillm.engine import Engine
from minillm.roofline import Device
from minillm.simulate import SimulatedRunner
from minillm.workload import Refusal, converse


def test_one_small_run(tmp_path, capsys):
    """Both tables, every program, and hit rates that follow from the lengths; nothing about time is asserted."""
    file = tmp_path / "found.json"
    arguments = ["--model", "draft", "--rounds", "1", "--sessions", "8", "--unit", "2", "--json", str(file)]
    values = many_users.main(arguments)
    printed = capsys.readouterr().out
    for title in ("whole", "chunks, budget 64", "few-shot", "chat", "agent", "samples", "nothing shared"):
        assert title in printed
    assert all(key.startswith(("draft_stall_", "draft_prefix_")) for key in values), "figures belong to a model"
    assert values["draft_prefix_hit_rate_nothing_shared"]["value"] == 0
    assert 0 < values["draft_prefix_hit_rate_few_shot"]["value"] < 1
    assert values["draft_prefix_hit_rate_agent"]["value"] > 0.3
    assert values["draft_prefix_speedup_chat"]["unit"] == "×"
    assert json.loads(file.read_text())["values"] == values
    assert all(values[f"draft_stall_{what}_whole"]["value"] > 0 for what in ("p99_itl", "longest_itl", "ttft"))


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--budget", "-1"], ["--unit", "0"]])
def test_a_number_out_of_range_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        many_users.main(["--model", "draft", *wrong])
    assert "must be 1 or more" in capsys.readouterr().err


def test_programs_that_outgrow_the_context_are_refused(capsys, monkeypatch):
    """Exactly those of which the engine would refuse a turn; before anything is measured."""
    draft = ModelConfig.preset("draft")

    def refused(config: ModelConfig, drawn: dict) -> bool:
        settings = EngineConfig(num_blocks=400)
        runner = SimulatedRunner(config, Device.datasheet("laptop"), settings)
        outputs = [
            o for sessions in drawn.values() for each in converse(Engine(runner, settings), sessions) for o in each
        ]
        return any(isinstance(output, Refusal) for output in outputs)

    drawn = many_users.draw_programs(draft, 3, 5)
    last = max(drawn["agent"], key=lambda s: sum(map(len, s.turns)))
    longest = sum(map(len, last.turns)) + 5 * 5  # five answers of `unit` tokens
    roomy, tight = (replace(draft, max_context=room) for room in (longest, longest - 1))
    assert many_users.draw_programs(roomy, 3, 5) == drawn and not refused(roomy, drawn)
    with pytest.raises(ValueError, match=f"--unit 5 lets the program 'agent' grow to {longest} tokens"):
        many_users.draw_programs(tight, 3, 5)
    assert refused(tight, drawn)
    monkeypatch.setattr(many_users, "measure_stall", lambda *_: pytest.fail("it measured"))
    with pytest.raises(SystemExit):
        many_users.main(["--model", "draft", "--sessions", "2", "--unit", "80"])
    assert "and the model holds 512: take a smaller unit" in capsys.readouterr().err
