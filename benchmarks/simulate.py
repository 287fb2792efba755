"""How far is the simulated runner from the real one, here? Predicted step times beside measured ones.

    python -m benchmarks.simulate                                  # smollm2 and tiny, about a minute
    python -m benchmarks.simulate --model tiny --decode 8 --prompt 64 --steps 8

Both runners get the very same steps: the engine drives the real one, and before each step the simulated one is asked
what it should cost on this machine, whose rates were measured in the same run. The prediction counts bytes,
operations and the overhead of an empty layer, and no fit: a ratio below 1 is time that the model of costs does not
explain (the attention's gathers, norms, sampling), one above 1 means that weights stayed in a processor's cache.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks import record
from benchmarks.decode import load
from minillm.config import EngineConfig
from minillm.engine import Engine
from minillm.lab import usable_cores
from minillm.lab.tables import Table, format_number
from minillm.lab.timing import Timing, format_seconds
from minillm.model import Transformer
from minillm.roofline import Device
from minillm.runner import ModelRunner
from minillm.scheduler import Step
from minillm.simulate import SimulatedRunner
from minillm.workload import fixed, make_workload, replay

COLUMNS = ["model, step", "predicted", "measured", ("ratio", "predicted over measured")]
CONTEXT = 128  # tokens in the cache of each request that decodes


class BothRunners:
    """The real runner, and beside each step what the simulated one says it should take."""

    def __init__(self, real: ModelRunner, simulated: SimulatedRunner):
        self.real, self.simulated = real, simulated
        self.config, self.num_blocks = real.config, real.num_blocks
        self.now, self.wait_until = real.now, real.wait_until
        self.seen: list[tuple[list[int], float, float, str]] = []  # tokens of each request, both times, what binds

    def execute(self, step: Step) -> list[list[int]]:
        """Run the step, and note both times in seconds."""
        cost = self.simulated.cost(step)
        began = time.perf_counter()
        tokens = self.real.execute(step)
        self.seen.append((list(step.counts), cost.time, time.perf_counter() - began, cost.bound))
        return tokens


@dataclass(frozen=True)
class Result:
    """One kind of step of one model: the median prediction in seconds, the measured steps, and what binds them."""

    model: str
    step: str
    predicted: float
    measured: Timing
    bound: str

    @property
    def ratio(self) -> float:
        """Predicted over measured: 1 is a perfect prediction, below 1 an optimistic one."""
        return self.predicted / self.measured.median

    def row(self) -> tuple:
        """A row under `COLUMNS`."""
        spread = f"{format_seconds(self.measured.low)} to {format_seconds(self.measured.high)}"
        cells = format_seconds(self.predicted), (format_seconds(self.measured.median), spread)
        return f"{self.model}, {self.step}", *cells, (f"{format_number(self.ratio)}×", self.bound)


def run(name: str, batches: Sequence[int], prompt: int, steps: int, device: str | None = None) -> Iterator[Result]:
    """`steps` decode steps of each batch, and as many prompts of `prompt` tokens, one a step; measured when asked for.

    Raises ValueError, at once, for a model that cannot be loaded and where a setting does not fit its context.
    """
    model = load(name, device, None)
    room = model.config.max_context
    context = min(CONTEXT, room - steps - 3)
    if not (context >= 1 and prompt + 1 <= room):
        raise ValueError(f"{name} holds {room} tokens: too few for {steps} decode steps or a prompt of {prompt}")
    return measure_steps(name, model, batches, context, prompt, steps)


def measure_steps(
    name: str, model: Transformer, batches: Sequence[int], context: int, prompt: int, steps: int
) -> Iterator[Result]:
    """A result for each batch at `context`, then one for the prompts."""
    config, machine = model.config, Device.measure(model.device, model.dtype)

    def measure(label: str, requests: int, length: int, tokens: int, counts: list[int]) -> Result:
        settings = EngineConfig(
            num_blocks=len(counts) * math.ceil((length + tokens) / EngineConfig.block_size),
            max_batch_size=len(counts),
            token_budget=length * len(counts),  # all prompts in one step
        )
        simulated = SimulatedRunner(config, machine, settings, dtype=model.dtype)
        both = BothRunners(ModelRunner(model, settings), simulated)
        replay(Engine(both, settings), make_workload(requests, fixed(length), fixed(tokens), config.vocab_size))
        alike = [seen for seen in both.seen if seen[0] == counts][1:]  # the first warms up
        predicted = statistics.median(predicted for _, predicted, _, _ in alike)
        return Result(name, label, predicted, Timing(tuple(taken for _, _, taken, _ in alike)), alike[0][3])

    for batch in batches:
        yield measure(f"decode of {batch} at {context}", batch, context, steps + 2, [1] * batch)
    yield measure(f"prompt of {prompt}", steps + 1, prompt, 1, [prompt])


def main(arguments: list[str] | None = None) -> list[Result]:
    """Run every setting and print the table; returns the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["smollm2", "tiny"], help="names that load_model knows")
    parser.add_argument("--decode", nargs="*", type=int, default=[1, 8, 32], help="requests that decode together")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=16, help="timed steps of each kind")
    parser.add_argument("--device", help="cpu or cuda")
    asked = parser.parse_args(arguments)
    for name, value in (("decode", min(asked.decode, default=1)), ("prompt", asked.prompt), ("steps", asked.steps)):
        least = 2 if name == "prompt" else 1
        if value < least:
            parser.error(f"--{name} must be {least} or more, got {value}")
    torch.set_num_threads(usable_cores())
    with record.refusing(parser):  # all models, before the first is measured
        runs = [run(name, asked.decode, asked.prompt, asked.steps, asked.device) for name in asked.model]
    results = list(itertools.chain.from_iterable(runs))
    here = f"{record.device_name(asked.device)}, torch {torch.__version__}"
    caption = f"{here}. Medians of {asked.steps} steps; with them the middle half, and what the prediction is bound by."
    print(Table([result.row() for result in results], COLUMNS, caption))
    return results


if __name__ == "__main__":
    main()
