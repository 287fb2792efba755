"""What users do to each other, and for each other: the stall behind a long prompt, and starts that are shared.

    python -m benchmarks.many_users                      # smollm2: minutes
    python -m benchmarks.many_users --model tiny --rounds 1 --json FILE

First, requests are decoding when a long prompt arrives: the 99th percentile of their inter-token latencies with
whole prompts and with chunks, and what the long prompt waits. Then programs of the kinds that share their starts, and
one that shares nothing, with the prefix cache on and off: throughput and hit rate. All of it in turn, in one run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks import record
from benchmarks.decode import load
from minillm.config import EngineConfig, ModelConfig
from minillm.engine import Engine
from minillm.lab import usable_cores
from minillm.lab.tables import Table
from minillm.lab.timing import Comparison, Timing
from minillm.runner import ModelRunner
from minillm.sampling import SamplingParams
from minillm.workload import Session, converse, make_sessions, programs

STALL_COLUMNS = ["prompts", ("ITL, p99", "ms, of those who decode"), ("longest ITL", "ms"), ("TTFT", "s, long prompt")]
PREFIX_COLUMNS = ["program", ("hit rate", "of prompt tokens"), ("throughput", "cache on, times off; middle half")]


def stall(runner: ModelRunner, config: EngineConfig, long: int, seed: int) -> tuple[list[float], float]:
    """Inter-token latencies, in seconds, of four requests that decode, and the TTFT of a long prompt among them."""
    rng = np.random.default_rng(seed)
    vocab, engine, done = runner.config.vocab_size, Engine(runner, config), {}
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    ids = [engine.add_request(rng.integers(vocab, size=16).tolist(), params) for _ in range(4)]
    late, steps = None, 0
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        steps += 1
        if steps == 10:
            late = engine.add_request(rng.integers(vocab, size=long).tolist(), replace(params, max_tokens=1))
    gaps = [gap for id in ids for gap in done[id].metrics.itl]
    return gaps, done[late].metrics.ttft


def measure_stall(model, rounds: int, budget: int) -> list[tuple]:
    """Whole prompts and chunks, in turn: a table row each, and the figures."""
    long = min(1024, model.config.max_context * 3 // 4)
    kinds = {"whole": EngineConfig(chunked_prefill=False, prefix_caching=False, num_blocks=256)}
    kinds[f"chunks, budget {budget}"] = EngineConfig(token_budget=budget, prefix_caching=False, num_blocks=256)
    runner, found = ModelRunner(model, kinds["whole"]), {name: ([], []) for name in kinds}
    for number in range(rounds + 1):
        for name, config in kinds.items():
            gaps, ttft = stall(runner, config, long, number)
            if number:  # the first round warms up
                found[name][0].append(gaps)
                found[name][1].append(ttft)
    rows = []
    for name, (gaps, ttfts) in found.items():
        p99 = statistics.median(float(np.percentile(each, 99)) for each in gaps)
        longest = statistics.median(max(each) for each in gaps)
        rows.append((name, 1000 * p99, 1000 * longest, statistics.median(ttfts)))
    return rows


def draw_programs(config: ModelConfig, count: int, unit: int) -> dict[str, list[Session]]:
    """The sessions of every program. Raises ValueError for a program that outgrows the model's context."""
    drawn = {
        name: make_sessions(count, vocab_size=config.vocab_size, seed=1, **shape)
        for name, shape in programs(unit).items()
    }
    for name, sessions in drawn.items():
        longest = max(sum(map(len, s.turns)) + len(s.turns) * s.params.max_tokens for s in sessions)
        if longest > config.max_context:
            raise ValueError(
                f"--unit {unit} lets the program {name!r} grow to {longest} tokens, and the model holds "
                f"{config.max_context}: take a smaller unit"
            )
    return drawn


def measure_prefixes(model, rounds: int, drawn: dict[str, list[Session]]) -> list[tuple]:
    """Every program with the cache on and off, in turn: a table row each."""
    rows = []
    for name, sessions in drawn.items():
        settings = {way: EngineConfig(prefix_caching=way == "on", max_batch_size=4) for way in ("off", "on")}
        runners = {way: ModelRunner(model, config) for way, config in settings.items()}
        seconds: dict[str, list[float]] = {way: [] for way in settings}
        hits = prompts = 0
        for number in range(rounds + 1):
            for way, config in settings.items():
                engine = Engine(runners[way], config)
                began = time.perf_counter()
                outputs = [output for each in converse(engine, sessions) for output in each]
                if number:  # the first round warms up, and touches all memory of the cache
                    seconds[way].append(time.perf_counter() - began)
                if way == "on":
                    hits = sum(output.metrics.cached_tokens for output in outputs)
                    prompts = sum(len(output.prompt_ids) for output in outputs)
        ratio = Comparison({way: Timing(tuple(taken)) for way, taken in seconds.items()}).speedup("on")
        rows.append((name, hits / prompts, ratio))
    return rows


def main(arguments: list[str] | None = None) -> dict[str, dict]:
    """Both parts on one model; prints two tables and returns the figures as in a file of `book/measurements`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_users", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a name that load_model knows")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of taking turns")
    parser.add_argument("--budget", type=int, default=64, help="tokens a step, with chunks")
    parser.add_argument("--sessions", type=int, default=16, help="of each program; four run at once")
    parser.add_argument("--unit", type=int, default=8, help="tokens that scale the programs' lengths")
    parser.add_argument("--json", type=record.output_file, help="write the figures as a file of book/measurements")
    asked = parser.parse_args(arguments)
    for name in ("rounds", "budget", "sessions", "unit"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name} must be 1 or more, got {getattr(asked, name)}")
    torch.set_num_threads(usable_cores())
    with record.refusing(parser):
        model = load(asked.model, None, None)
        drawn = draw_programs(model.config, asked.sessions, asked.unit)
    here = record.device_name()
    caption = f"{asked.model} on {here}, torch {torch.__version__}. Medians of {asked.rounds} rounds in turn."
    stalls = measure_stall(model, asked.rounds, max(asked.budget, 4))
    print(Table([(n, f"{a:.0f}", f"{b:.0f}", f"{c:.2f}") for n, a, b, c in stalls], STALL_COLUMNS, caption), flush=True)
    shared = measure_prefixes(model, asked.rounds, drawn)
    print(Table([(name, f"{100 * hits:.0f}%", str(ratio)) for name, hits, ratio in shared], PREFIX_COLUMNS, caption))
    values = {}
    for name, p99, longest, ttft in stalls:
        key = name.split(",")[0]
        values[f"{asked.model}_stall_p99_itl_{key}"] = {"value": p99, "unit": "ms"}
        values[f"{asked.model}_stall_longest_itl_{key}"] = {"value": longest, "unit": "ms"}
        values[f"{asked.model}_stall_ttft_{key}"] = {"value": ttft, "unit": "s"}
    for name, hit_rate, ratio in shared:
        key = name.replace(" ", "_").replace("-", "_")
        values[f"{asked.model}_prefix_hit_rate_{key}"] = {"value": hit_rate, "unit": ""}
        values[f"{asked.model}_prefix_speedup_{key}"] = {
            "value": ratio.median, "unit": "×", "low": ratio.low, "high": ratio.high
        }  # fmt: skip
    if asked.json:
        words = sys.argv[1:] if arguments is None else arguments
        record.write(asked.json, ["benchmarks.many_users", *words], values)
    return values


if __name__ == "__main__":
    main()
