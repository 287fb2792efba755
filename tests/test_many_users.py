"""The benchmark of stalls and shared starts runs on the smallest model, and its counts are right."""

import json

import pytest

from benchmarks import many_users


def test_one_small_run(tmp_path, capsys):
    """Both tables, every program, and hit rates that follow from the lengths; nothing about time is asserted."""
    file = tmp_path / "found.json"
    arguments = ["--model", "draft", "--rounds", "1", "--sessions", "8", "--unit", "2", "--json", str(file)]
    values = many_users.main(arguments)
    printed = capsys.readouterr().out
    for title in ("whole", "chunks, budget 64", "few-shot", "chat", "agent", "samples", "nothing shared"):
        assert title in printed
    assert values["prefix_hit_rate_nothing_shared"]["value"] == 0
    assert 0 < values["prefix_hit_rate_few_shot"]["value"] < 1
    assert values["prefix_hit_rate_agent"]["value"] > 0.3
    assert json.loads(file.read_text())["values"] == values
    assert all(values[f"stall_{what}_whole"]["value"] > 0 for what in ("p99_itl", "longest_itl", "ttft"))


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--budget", "-1"], ["--unit", "0"]])
def test_a_number_out_of_range_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        many_users.main(["--model", "draft", *wrong])
    assert "must be 1 or more" in capsys.readouterr().err
