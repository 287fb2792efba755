"""Decoding beside its peers and beside the machine's bound, all in one run.

    python -m benchmarks.decode                          # smollm2 and tiny, batch 1, 8 and 32, two contexts, minutes
    python -m benchmarks.decode --model tiny --batch 1 --context short --json FILE

In every setting, a batch of sequences of one length already lies in the cache, and each engine makes the same
number of greedy tokens from there, taking turns: bound, minillm, peers, and again. All of them get the same
weights, the same prompt and the same number of threads. A clock starts when the first tokens have reached the
host and stops when the last ones have, so it holds whole steps only, on a CPU and on a GPU alike. The bound is
what the bytes of a step take at the bandwidth that is measured in the same round (`minillm.roofline`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import record
from benchmarks.peers import LlamaCpp, Transformers
from minillm.config import PRESETS, ModelConfig
from minillm.kv_cache import ContiguousCache
from minillm.lab import usable_cores
from minillm.lab.tables import Table, format_number
from minillm.lab.timing import Comparison, Timing
from minillm.model import Transformer
from minillm.roofline import Device, StepCost, decode_step, measure_bandwidth
from minillm.sampling import SamplingParams, sample
from minillm.weights import CheckpointError, find_checkpoint, load_model

CONTEXTS = {"short": 128, "long": 1024}  # tokens in the cache, or as many as the model has room for
BOUND, OURS, TRANSFORMERS, LLAMA_CPP = "bound", "minillm", "transformers", "llama.cpp"
PEERS = (TRANSFORMERS, LLAMA_CPP)
COLUMNS = ["model, batch, context", "engine", "tokens/s", "GB/s", ("minillm", "times this engine")]


class MiniLLM:
    """Our cached generation: `Transformer` over a `ContiguousCache`, tokens from `sample`."""

    def __init__(self, model: Transformer):
        self.model = model

    @torch.inference_mode()
    def fill(self, prompt: list[int], batch: int, steps: int) -> None:
        """Cache all of `prompt` but its last token, once, then copied for every sequence of the batch."""
        model, context = self.model, len(prompt) - 1
        one = ContiguousCache(model.config, 1, context, model.device, model.dtype)
        model(torch.tensor(prompt[:-1], device=model.device), one.positions([context]), one)
        self.cache = ContiguousCache(model.config, batch, context + steps + 1, model.device, model.dtype)
        self.cache.k[:, :, :, :context], self.cache.v[:, :, :, :context] = one.k, one.v
        self.cache.lengths = [context] * batch
        self.context, self.last = context, torch.full((batch,), prompt[-1], device=model.device)

    @torch.inference_mode()
    def decode(self, steps: int) -> tuple[float, list[list[int]]]:
        """Seconds of `steps` steps that follow a first one, and the 1 + steps tokens of each sequence."""
        tokens, batch, made = self.last, len(self.last), []
        counts, params, generators = [1] * batch, [SamplingParams(temperature=0)] * batch, [None] * batch
        for sequence in range(batch):
            self.cache.truncate(sequence, self.context)
        for step in range(steps + 1):
            if step == 1:
                began = time.perf_counter()
            hidden = self.model(tokens, self.cache.positions(counts), self.cache.view(counts))
            made.append(sample(self.model.logits(hidden), params, generators))  # on the host
            tokens = made[-1].to(self.model.device)
        return time.perf_counter() - began, torch.stack(made, 1).tolist()


class Bound:
    """What a step cannot beat: its bytes at the bandwidth measured now, or its operations at the peak."""

    def __init__(self, config: ModelConfig, machine: Device, device: torch.device, dtype: torch.dtype):
        self.config, self.machine, self.device, self.dtype = config, machine, device, dtype

    def fill(self, prompt: list[int], batch: int, steps: int) -> None:
        """Note what the step will be; on average half of the new tokens are in the cache too."""
        self.batch, self.context = batch, len(prompt) + steps // 2

    @torch.inference_mode()
    def decode(self, steps: int) -> tuple[float, list]:
        """Seconds that `steps` steps must take, by a bandwidth measured on the spot."""
        bandwidth, _ = measure_bandwidth(self.device, self.dtype)
        cost = self.cost(replace(self.machine, bandwidth=bandwidth))
        return steps * max(cost.memory_time, cost.compute_time), []

    def cost(self, machine: Device | None = None) -> StepCost:
        """Bytes and operations of one step in the middle of the run."""
        return decode_step(self.config, machine or self.machine, self.batch, self.context, self.dtype)


@dataclass(frozen=True)
class Result:
    """One setting: seconds per step of every engine that ran, in turn, and the bytes that a step of each moves."""

    model: str
    batch: int
    context: int
    taken: Comparison
    bytes_per_step: dict[str, float]

    def rate(self, engine: str) -> tuple[float, float, float]:
        """Tokens per second of the whole batch: median, lower and upper quartile."""
        timing = self.taken[engine]
        return self.batch / timing.median, self.batch / timing.high, self.batch / timing.low

    def rows(self) -> Iterator[tuple]:
        """A table row per engine: rate, bytes per second that it achieves, and how many times faster minillm is."""
        for number, engine in enumerate(self.taken.timings):
            setting = f"{self.model}, {self.batch}, {self.context}" if not number else ""
            median, *spread = map(format_number, self.rate(engine))
            gigabytes = self.bytes_per_step[engine] / self.taken[engine].median / 1e9
            ratio = self.taken.speedup(OURS, engine)
            cells = ("", "") if engine == OURS else (f"{ratio.median:.2f}×", f"{ratio.low:.2f} to {ratio.high:.2f}")
            yield setting, engine, (median, " to ".join(spread)), format_number(gigabytes), cells

    def values(self) -> dict[str, dict]:
        """Rates and ratios under the keys of a file in `book/measurements`."""
        found, setting = {}, f"{self.model}_batch_{self.batch}_context_{self.context}"
        for engine in self.taken.timings:
            median, low, high = self.rate(engine)
            found[f"decode_{engine}_{setting}"] = {"value": median, "unit": "tokens/s", "low": low, "high": high}
            if engine != OURS:
                ratio = self.taken.speedup(OURS, engine)
                numbers = {"value": ratio.median, "unit": "×", "low": ratio.low, "high": ratio.high}
                found[f"decode_minillm_over_{engine}_{setting}"] = numbers
        return found


def race(engines: dict, steps: int, rounds: int) -> Comparison:
    """Every engine makes `steps` steps a round, in turn; a first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            taken, _ = engine.decode(steps)
            if number:
                seconds[name].append(taken / steps)
    return Comparison({name: Timing(tuple(taken), name) for name, taken in seconds.items()})


def load(name: str, device: str | None, dtype: str | None) -> Transformer:
    """The model; where its weights are not installed, its shape with random ones: speed does not depend on them.

    Raises ValueError for what is neither a checkpoint nor a known shape, and for a device or dtype that is not there.
    """
    try:
        return load_model(name, device, dtype)
    except (CheckpointError, ImportError) as reason:
        if name not in PRESETS:
            raise
        print(f"{name}: random weights, for {reason}")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or ("float32" if torch.device(device).type == "cpu" else "bfloat16")
        model = Transformer(ModelConfig.preset(name)).initialize()
        return model.to(device, getattr(torch, dtype)).eval().requires_grad_(False)


def make_engines(name: str, model: Transformer, machine: Device, peers: Sequence[str]) -> dict:
    """The bound, ours, and the peers that can run this model here; prints why another cannot."""
    engines = {BOUND: Bound(model.config, machine, model.device, model.dtype), OURS: MiniLLM(model)}
    for peer in peers:
        try:
            if peer == TRANSFORMERS:
                engines[peer] = Transformers(model)
            elif model.device.type != "cpu":
                print(f"{peer}: skipped, it is compared on a CPU only")
            elif (file := find_checkpoint(name)).suffix != ".gguf":
                print(f"{peer}: skipped for {name}, whose weights are not in a GGUF file")
            else:
                engines[peer] = LlamaCpp(file, torch.get_num_threads())
        except (CheckpointError, ImportError) as reason:
            print(f"{peer}: skipped, {reason}")
    return engines


def run(
    name: str, batches: Sequence[int], contexts: Sequence[int], peers: Sequence[str] = PEERS, steps: int = 32,
    rounds: int = 5, device: str | None = None, dtype: str | None = None,
) -> Iterator[Result]:  # fmt: skip
    """Results of one model, setting by setting, measured when they are asked for.

    Raises ValueError, at once, for a model that cannot be loaded and for steps that leave it no room.
    """
    model = load(name, device, dtype)
    longest = model.config.max_context - steps - 2
    if longest < 1:
        raise ValueError(f"{steps} steps leave no room for a context: {name} holds {model.config.max_context}")
    return measure(name, model, batches, dict.fromkeys(min(asked, longest) for asked in contexts), peers, steps, rounds)


def measure(
    name: str, model: Transformer, batches: Sequence[int], contexts: Iterable[int], peers: Sequence[str], steps: int,
    rounds: int,
) -> Iterator[Result]:  # fmt: skip
    """Race in every context and batch."""
    machine = Device.measure(model.device, model.dtype)
    engines = make_engines(name, model, machine, peers)
    for context in contexts:
        generator = torch.Generator().manual_seed(context)
        prompt = torch.randint(model.config.vocab_size, (context + 1,), generator=generator).tolist()
        for batch in batches:
            for engine in engines.values():
                engine.fill(prompt, batch, steps)
            cost = engines[BOUND].cost()
            moved = dict.fromkeys(engines, cost.bytes)
            if LLAMA_CPP in engines:  # its own weights, and keys and values of two bytes
                kv_bytes = cost.kv_bytes * 2 / model.dtype.itemsize
                moved[LLAMA_CPP] = engines[LLAMA_CPP].weight_bytes + kv_bytes
            yield Result(name, batch, context, race(engines, steps, rounds), moved)


def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line and what it says; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["smollm2", "tiny"], help="names that load_model knows")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32], help="sequences that decode together")
    parser.add_argument("--context", nargs="+", choices=CONTEXTS, default=list(CONTEXTS), help=str(CONTEXTS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--steps", type=int, default=32, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of taking turns")
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--dtype", help="float32 on a CPU and bfloat16 on a GPU, unless named")
    parser.add_argument("--json", type=record.output_file, help="write the figures as a file of book/measurements")
    asked = parser.parse_args(arguments)
    for name in ("steps", "rounds"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name} must be 1 or more, got {getattr(asked, name)}")
    if min(asked.batch) < 1:
        parser.error(f"--batch must be 1 or more, got {min(asked.batch)}")
    return parser, asked


def main(arguments: list[str] | None = None) -> list[Result]:
    """Run every setting, print each as it is done, then the table; returns the results."""
    parser, asked = parse(arguments)
    torch.set_num_threads(usable_cores())
    contexts = [CONTEXTS[context] for context in asked.context]
    settings = (asked.peers, asked.steps, asked.rounds, asked.device, asked.dtype)
    with record.refusing(parser):  # all models, before the first is measured
        runs = [run(name, asked.batch, contexts, *settings) for name in asked.model]
    results = []
    for result in itertools.chain.from_iterable(runs):
        results.append(result)
        print(Table(list(result.rows()), COLUMNS), flush=True)
    here = record.device_name(asked.device)
    print()
    caption = (
        f"{here}, torch {torch.__version__}. Medians of {asked.rounds} rounds of {asked.steps} steps taken in turn; "
        "in brackets the middle half. The bound reads from memory: weights that fit in a cache can beat it. "
        "llama.cpp computes from weights of 4 to 8 bits, so it moves fewer bytes."
    )
    print(Table([row for result in results for row in result.rows()], COLUMNS, caption))
    if asked.json:
        values = {key: value for result in results for key, value in result.values().items()}
        words = sys.argv[1:] if arguments is None else arguments
        record.write(asked.json, ["benchmarks.decode", *words], values, asked.device)
    return results


if __name__ == "__main__":
    main()
