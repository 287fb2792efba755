"""Serving many requests of widely varying length, beside peers and beside the machine's bound, all in one run.

    python -m benchmarks.serving                                  # smollm2, 64 requests, a batch of 16: minutes
    python -m benchmarks.serving --model tiny --requests 12 --rounds 1 --json FILE

All requests are there at the start. Every engine serves all of them, in turn: ideal, minillm (continuous and static
batching), `transformers` (static batches of the same size, padded on the left; and its own continuous batching), and
again. All of them get the same weights, prompts, limits and number of threads, and decode greedily. Only the tokens
that were asked for count: not the padding, not what a static batch makes beyond a request's own end. The ideal charges
every step of minillm's continuous schedule its roofline time, at the bandwidth and the arithmetic peak measured in
the same run (`minillm.simulate`).
What requests do to each other, the stall behind a long prompt and starts that are shared: `benchmarks.many_users`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import record
from benchmarks.decode import load
from benchmarks.serving_peers import PaddedBatches, PeerContinuous
from minillm.config import EngineConfig, ModelConfig
from minillm.engine import Engine
from minillm.lab import usable_cores
from minillm.lab.tables import Table, format_number
from minillm.lab.timing import Comparison, Timing
from minillm.model import Transformer
from minillm.naive import check_prompt
from minillm.roofline import Device, measure_bandwidth
from minillm.runner import ModelRunner
from minillm.simulate import SimulatedRunner
from minillm.workload import TimedRequest, capped_exponential, make_workload, replay, uniform

IDEAL, OURS, STATIC = "ideal", "minillm", "minillm static"
PEER_STATIC, PEER = "transformers static", "transformers continuous"
PEERS = (PEER_STATIC, PEER)
SHORTEST = 4  # output tokens
COLUMNS = ["engine", "tokens/s", ("minillm", "times this engine"), "GB/s", ("scheduler", "of a step")]


def varied_lengths(count: int, prompts: tuple[int, int], outputs: int, vocab_size: int, seed=0) -> list[TimedRequest]:
    """Prompts of any length between two; outputs of 4 to `outputs` tokens, exponential: many short, some long."""
    exponential = capped_exponential(outputs / 4, outputs - SHORTEST)
    return make_workload(count, uniform(*prompts), lambda g, n: SHORTEST + exponential(g, n), vocab_size, seed=seed)


class Served:
    """Our engine, continuous or static."""

    def __init__(self, runner: ModelRunner, config: EngineConfig):
        self.runner, self.config = runner, config
        self.shares: list[float] = []

    def serve(self, requests: Sequence[TimedRequest]) -> tuple[float, list[list[int]]]:
        """Seconds for all of them, and the new tokens of each."""
        engine = Engine(self.runner, self.config)
        began = time.perf_counter()
        outputs = replay(engine, requests)
        seconds = time.perf_counter() - began
        self.shares.append(1 - engine.stats["runner_seconds"] / engine.stats["seconds"])
        return seconds, [output.outputs[0].token_ids for output in outputs]


class Counting(SimulatedRunner):
    """A simulated runner that also adds up the bytes that its steps move."""

    moved = 0.0

    def execute(self, step) -> list[list[int]]:
        self.moved += self.cost(step).bytes
        return super().execute(step)


class Ideal:
    """Every step of our schedule at its roofline: no overhead, and no operation that is not in the model."""

    def __init__(self, shape: ModelConfig, machine: Device, device: torch.device, dtype, config: EngineConfig):
        self.shape, self.machine, self.device, self.dtype, self.config = shape, machine, device, dtype, config

    def serve(self, requests: Sequence[TimedRequest]) -> tuple[float, list]:
        """Seconds at the bandwidth measured now; no tokens."""
        bandwidth, _ = measure_bandwidth(self.device, self.dtype)
        return self.simulate(requests, self.config, replace(self.machine, bandwidth=bandwidth)).now(), []

    def simulate(self, requests, config: EngineConfig, machine: Device | None = None) -> Counting:
        """A runner that has been through all steps: its clock and its bytes are the sums."""
        runner = Counting(self.shape, machine or self.machine, config, dtype=self.dtype, overhead=0.0)
        replay(Engine(runner, config), requests)
        return runner


@dataclass(frozen=True)
class Result:
    """What each engine took for the whole workload, in turn."""

    model: str
    tokens: int
    taken: Comparison
    moved: dict[str, float]  # bytes, of the engines whose steps we know
    shares: dict[str, list[float]]  # of a step that the runner did not take, a round each

    def rate(self, engine: str) -> tuple[float, float, float]:
        """Requested output tokens per second: median, lower and upper quartile of the rounds."""
        timing = self.taken[engine]
        return self.tokens / timing.median, self.tokens / timing.high, self.tokens / timing.low

    def rows(self) -> list[tuple]:
        """A table row per engine."""
        rows = []
        for engine, timing in self.taken.timings.items():
            median, *spread = map(format_number, self.rate(engine))
            ratio, share = self.taken.speedup(OURS, engine), self.shares.get(engine)
            cell = "" if engine == OURS else (f"{ratio.median:.2f}×", f"{ratio.low:.2f} to {ratio.high:.2f}")
            moved = self.moved.get(engine)
            gigabytes = "" if moved is None else format_number(moved / timing.median / 1e9)
            share = "" if share is None else f"{100 * sorted(share)[len(share) // 2]:.1f}%"
            rows.append((engine, (median, " to ".join(spread)), cell, gigabytes, share))
        return rows

    def values(self) -> dict[str, dict]:
        """Under the keys of a file in `book/measurements`."""
        found = {}
        for engine in self.taken.timings:
            name = f"{engine.replace(' ', '_')}_{self.model}"
            median, low, high = self.rate(engine)
            found[f"serving_{name}"] = {"value": median, "unit": "tokens/s", "low": low, "high": high}
            if engine != OURS:
                ratio = self.taken.speedup(OURS, engine)
                numbers = {"value": ratio.median, "unit": "×", "low": ratio.low, "high": ratio.high}
                found[f"serving_minillm_over_{name}"] = numbers
            if engine in self.shares:
                share = sorted(self.shares[engine])
                numbers = {"value": share[len(share) // 2], "unit": "", "low": share[0], "high": share[-1]}
                found[f"serving_scheduler_share_{name}"] = numbers
        return found


def make_engines(model: Transformer, machine: Device, config: EngineConfig, peers: Sequence[str]) -> dict:
    """The ideal, ours and the peers that are here; prints why another is not."""
    runner, static = ModelRunner(model, config), replace(config, batching="static")
    engines: dict = {IDEAL: Ideal(model.config, machine, model.device, model.dtype, config)}
    engines |= {OURS: Served(runner, config), STATIC: Served(runner, static)}
    for peer in peers:
        try:
            made = PaddedBatches(model, config.max_batch_size) if peer == PEER_STATIC else PeerContinuous(model, config)
            engines[peer] = made
        except Exception as reason:  # optional, and its own to fail in any way
            print(f"{peer}: skipped, {type(reason).__name__}: {reason}")
    return engines


def race(engines: dict, requests: Sequence[TimedRequest], rounds: int) -> Comparison:
    """Every engine serves all requests, in turn, after a few tokens to warm up. A peer that fails leaves the race."""
    short = [replace(r, params=replace(r.params, max_tokens=2)) for r in requests[:4]]
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, engine in list(engines.items()):
            try:
                taken, outputs = engine.serve(requests if number else short)
                check_outputs(name, outputs, requests if number else short)
            except Exception as reason:
                if name not in PEERS:
                    raise
                print(f"{name}: skipped, {type(reason).__name__}: {reason}")
                del engines[name]
                seconds.pop(name, None)
                continue
            if number:
                seconds.setdefault(name, []).append(taken)
                print(f"round {number}, {name}: {taken:.1f} s", flush=True)
            elif isinstance(engine, Served):
                engine.shares.clear()
    return Comparison({name: Timing(tuple(taken), name) for name, taken in seconds.items()})


def check_outputs(name: str, outputs: list[list[int]], requests: Sequence[TimedRequest]) -> None:
    """RuntimeError unless every request got exactly the tokens that it asked for."""
    if name == IDEAL:
        return
    made, wanted = [len(tokens) for tokens in outputs], [request.params.max_tokens for request in requests]
    if made != wanted:
        raise RuntimeError(f"outputs of {made} tokens instead of {wanted}")


def prepare(name: str, asked: argparse.Namespace) -> tuple[Transformer, list[TimedRequest]]:
    """The model and its requests. Raises ValueError for a model that cannot be loaded, or that cannot hold them."""
    model = load(name, asked.device, asked.dtype)
    requests = varied_lengths(asked.requests, asked.prompts, asked.outputs, model.config.vocab_size, asked.seed)
    for request in requests:
        try:
            check_prompt(request.prompt_ids, request.params, model.config)
        except ValueError as reason:
            raise ValueError(f"--prompts and --outputs draw what {name} cannot hold: {reason}") from reason
    return model, requests


def run(name: str, model: Transformer, requests: list[TimedRequest], asked: argparse.Namespace) -> Result:
    """One model, all engines."""
    blocks = -(-(asked.prompts[1] + asked.outputs) // 16)
    config = EngineConfig(
        block_size=16, num_blocks=asked.batch * blocks, max_batch_size=asked.batch, token_budget=asked.budget
    )
    engines = make_engines(model, Device.measure(model.device, model.dtype), config, asked.peers)
    ideal = engines[IDEAL]
    moved = {engine: ideal.simulate(requests, config).moved for engine in (IDEAL, OURS)}
    moved[STATIC] = ideal.simulate(requests, engines[STATIC].config).moved
    try:
        taken = race(engines, requests, asked.rounds)
    finally:
        if PEER in engines:
            engines[PEER].close()
    tokens = sum(request.params.max_tokens for request in requests)
    return Result(name, tokens, taken, moved, {engine: engines[engine].shares for engine in (OURS, STATIC)})


def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line and what it says; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["smollm2"], help="names that load_model knows")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="requests that run at once, on all sides")
    parser.add_argument("--budget", type=int, default=512, help="tokens a step, where there are steps")
    parser.add_argument("--prompts", nargs=2, type=int, default=[16, 128], help="shortest and longest, in tokens")
    parser.add_argument("--outputs", type=int, default=160, help="longest; the mean is about a quarter")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=2, help="rounds of taking turns")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths and prompts")
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--dtype", help="float32 on a CPU and bfloat16 on a GPU, unless named")
    parser.add_argument("--json", type=record.output_file, help="write the figures as a file of book/measurements")
    asked = parser.parse_args(arguments)
    for name, least in (("requests", 1), ("batch", 1), ("rounds", 1), ("outputs", SHORTEST + 1), ("seed", 0)):
        if getattr(asked, name) < least:
            parser.error(f"--{name} must be {least} or more, got {getattr(asked, name)}")
    if not 1 <= asked.prompts[0] <= asked.prompts[1]:
        parser.error(f"--prompts must be two lengths in order, got {asked.prompts}")
    if asked.budget < asked.batch:
        parser.error(f"--budget must be at least --batch, {asked.batch}, got {asked.budget}")
    return parser, asked


def main(arguments: list[str] | None = None) -> list[Result]:
    """Race on every model, print a table each; returns the results."""
    (parser, asked), results = parse(arguments), []
    torch.set_num_threads(usable_cores())
    with record.refusing(parser):  # all models, before the first is measured
        prepared = {name: prepare(name, asked) for name in asked.model}
    here = record.device_name(asked.device)
    for name, (model, requests) in prepared.items():
        result = run(name, model, requests, asked)
        results.append(result)
        caption = (
            f"{name} on {here}, torch {torch.__version__}. {asked.requests} requests at once, {result.tokens:,} output "
            f"tokens asked for, batches of {asked.batch}. Medians of {asked.rounds} rounds in turn; in brackets the "
            "middle half. GB/s counts weights, keys and values only."
        )
        print(Table(result.rows(), COLUMNS, caption), flush=True)
    if asked.json:
        values = {key: value for result in results for key, value in result.values().items()}
        words = sys.argv[1:] if arguments is None else arguments
        record.write(asked.json, ["benchmarks.serving", *words], values, asked.device)
    return results


if __name__ == "__main__":
    main()
