"""What fewer key/value heads cost and save: held-out loss before and after uptraining, and decode speed.

    python -m benchmarks.grouped_heads --text r-cran-janeaustenr_1.0.0-1_all.deb --json FILE    # half an hour
    python -m benchmarks.grouped_heads --parts speed                                            # a minute or two

Quality: `tiny-mha` is converted to 4, 2 and 1 key/value heads, and each is trained on for 5% of the original steps,
on the text that it was trained on (`minillm.checkpoints.train` says where that comes from). The unconverted model is
trained on likewise, so that what is compared differs in its heads alone. Of two learning rates each keeps the one
that is better on the validation text; the test text is looked at only then.

Speed: decode steps of one shape with random weights, at every number of heads, in turn, beside what the bytes of the
step take at the bandwidth measured here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks import decode, record
from minillm import gqa
from minillm.checkpoints import corpus, train
from minillm.config import ModelConfig
from minillm.lab import usable_cores
from minillm.lab.tables import Table
from minillm.lab.timing import Comparison, format_seconds
from minillm.model import Transformer
from minillm.roofline import Device, decode_step
from minillm.weights import load_model

SHARE = 0.05  # of the original steps, as in Ainslie et al. (2023)
EVALUATIONS = 5  # points of the curve, after the first
CURVE_WINDOWS = 20  # of the validation text, for the curve and to choose the rate
HELD_OUT = ("validation", "test")
DECODE_STEPS = 16  # timed, a round


@dataclass(frozen=True)
class Quality:
    """One number of key/value heads: losses in nats per token, by split and uptraining step."""

    heads: int
    kv_bytes_per_token: float  # in bfloat16
    learning_rate: float
    curve: dict[int, float]  # step: loss on the first windows of the validation text
    test: dict[int, float]  # step: loss on the whole test text, before the first step and after the last

    def values(self) -> dict[str, dict]:
        """The figures under the keys of a file in `book/measurements`."""
        losses = {"validation": self.curve, "test": self.test}
        found = {
            f"gqa_{split}_loss_{self.heads}_heads_step_{step}": {"value": round(loss, 5), "unit": "nats/token"}
            for split, steps in losses.items()
            for step, loss in steps.items()
        }
        return found | {f"gqa_learning_rate_{self.heads}_heads": {"value": self.learning_rate}}


def held_out(tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Ids of the validation and the test text that ship with the package."""
    texts = {name: (train.HERE / f"{name}.txt").read_text(encoding="utf-8") for name in HELD_OUT}
    return {name: torch.tensor(tokenizer.encode(text).ids) for name, text in texts.items()}


def measure_quality(converted: Transformer, ids: dict, steps: int, rates: Sequence[float]) -> Quality:
    """Train on at every rate, keep the better one on the validation text, then look at the test text."""
    context, heads = converted.config.max_context, converted.config.n_kv_heads
    watched = {round(steps * i / EVALUATIONS) for i in range(1, EVALUATIONS + 1)}

    def validation_loss(m: Transformer) -> float:
        return train.cross_entropy(m, ids["validation"][: CURVE_WINDOWS * context + 1], context)

    before, kept = validation_loss(converted), None
    for rate in rates:
        curve = {0: before}

        def watch(step, learner, loss, curve=curve):
            if step in watched:
                curve[step] = validation_loss(learner)

        trained = gqa.uptrain(converted, ids["train"], steps, rate, watch=watch)
        print(f"{heads} heads, rate {rate:g}: validation {before:.4f} -> {curve[steps]:.4f} nats a token", flush=True)
        if kept is None or curve[steps] < kept[1][steps]:
            kept = rate, curve, trained
    rate, curve, trained = kept
    test = {step: train.cross_entropy(m, ids["test"], context) for step, m in ((0, converted), (steps, trained))}
    return Quality(heads, converted.config.kv_bytes_per_token("bfloat16"), rate, curve, test)


def quality_table(results: Sequence[Quality]) -> Table:
    """Losses on the test text beside the size of the cache; the first result is what the others are held to."""
    rows = []
    for r in results:
        before, after = r.test.values()
        rest = f"{after - list(results[0].test.values())[1]:+.4f}"
        rows.append([f"{r.heads}", f"{r.kv_bytes_per_token:,.0f}", f"{before:.4f}", f"{after:.4f}", rest])
    columns = ["KV heads", ("cache, bytes/token", "bf16"), ("test loss", "converted"), ("test loss", "uptrained")]
    steps = max(results[0].curve)
    return Table(rows, [*columns, ("beside", "the first row")], f"Nats a token; uptrained for {steps} steps each.")


@dataclass(frozen=True)
class Speed:
    """One setting: seconds per decode step at each number of key/value heads, beside the bytes of a step."""

    batch: int
    context: int
    taken: Comparison
    predicted: dict[str, float]  # seconds, a bound

    def rows(self) -> Iterator[tuple]:
        """A table row per number of heads; the first is the baseline of both ratios."""
        first = self.taken.baseline
        for number, name in enumerate(self.taken.timings):
            ratio = self.taken.speedup(name)
            cells = ("", "") if not number else (f"{ratio.median:.2f}×", f"{ratio.low:.2f} to {ratio.high:.2f}")
            bound = "" if not number else f"{self.predicted[first] / self.predicted[name]:.2f}×"
            setting = f"{self.batch}, {self.context}" if not number else ""
            yield setting, name, format_seconds(self.taken[name].median), bound, cells

    def values(self) -> dict[str, dict]:
        """Tokens per second under the keys of a file in `book/measurements`, but for the shape's name in front."""
        return {
            f"decode_rate_{name}_heads_batch_{self.batch}_context_{self.context}": {
                "value": self.batch / timing.median, "unit": "tokens/s",
                "low": self.batch / timing.high, "high": self.batch / timing.low,
            }
            for name, timing in self.taken.timings.items()
        }  # fmt: skip


def measure_speed(
    config: ModelConfig, batches: Sequence[int], contexts: Sequence[int], steps: int, rounds: int, device: str
) -> Iterator[Speed]:
    """Decode steps of a shape at all its query heads, at its own key/value heads, and at one; random weights."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        full = Transformer(config.with_kv_heads(config.n_heads)).initialize().to(dtype).requires_grad_(False)
    numbers = dict.fromkeys((config.n_heads, config.n_kv_heads, 1))
    models = {f"{n}": gqa.convert(full, n) for n in numbers}
    del full
    machine = Device.measure(device, dtype)
    for context in contexts:
        prompt = torch.randint(config.vocab_size, (context + 1,), generator=torch.Generator().manual_seed(context))
        for batch in batches:
            engines = {name: decode.MiniLLM(model) for name, model in models.items()}
            for engine in engines.values():
                engine.fill(prompt.tolist(), batch, steps)
            stored = context + steps // 2
            predicted = {
                name: decode_step(m.config, machine, batch, stored, dtype).memory_time for name, m in models.items()
            }
            yield Speed(batch, context, decode.race(engines, steps, rounds), predicted)


def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line and what it says; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grouped_heads", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=["quality", "speed"], default=["quality"])
    parser.add_argument("--text", type=Path, help="the training text: a folder of .txt files, or janeaustenr's .deb")
    parser.add_argument("--model", default="tiny-mha", help="a multi-head model that shares tiny's tokenizer")
    parser.add_argument(
        "--heads", nargs="+", type=int, default=[8, 4, 2, 1], help="the first is what others are held to"
    )
    parser.add_argument("--steps", type=int, help="of uptraining; 5%% of tiny-mha's own unless given")
    parser.add_argument("--rates", nargs="+", type=float, default=[1.5e-4, 5e-4], help="learning rates to choose from")
    parser.add_argument("--shape", default="smollm2", help="the preset whose decode steps are timed")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--context", nargs="+", type=int, default=[64, 4096])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of taking turns")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=record.output_file, help="write the figures as a file of book/measurements")
    asked = parser.parse_args(arguments)
    if "quality" in asked.parts and asked.text is None:
        parser.error("--text is needed to train on; --parts speed does without")
    asked.steps = round(SHARE * train.RECIPES["tiny-mha"].steps) if asked.steps is None else asked.steps
    for name, value in (("steps", asked.steps), ("rounds", asked.rounds)):
        if value < 1:
            parser.error(f"--{name} must be 1 or more, got {value}")
    return parser, asked


def load_quality(asked: argparse.Namespace) -> tuple[list[Transformer], dict[str, torch.Tensor]]:
    """The model at all numbers of heads, and the ids of all texts. Raises ValueError for what cannot be had."""
    tokenizer = Tokenizer.from_file(str(train.HERE / "tokenizer.json"))
    ids = {"train": train.encode(tokenizer, corpus.split(asked.text)["train"])} | held_out(tokenizer)
    model = load_model(asked.model, "cpu", "float32")
    return [gqa.convert(model, heads) for heads in asked.heads], ids


def find_shape(asked: argparse.Namespace) -> ModelConfig:
    """The shape to time. Raises ValueError for one that is not known or too short for a context."""
    config, longest = ModelConfig.preset(asked.shape), max(asked.context)
    if longest + DECODE_STEPS + 1 > config.max_context:
        most = config.max_context - DECODE_STEPS - 1
        raise ValueError(f"--context {longest} is too long for {asked.shape}, which has room for {most} here")
    return config


def run_speed(config: ModelConfig, asked: argparse.Namespace) -> list[Speed]:
    """All batches and contexts of one shape."""
    results = []
    for result in measure_speed(config, asked.batch, asked.context, DECODE_STEPS, asked.rounds, asked.device):
        results.append(result)
        print(f"batch {result.batch}, context {result.context}: {result.taken}", flush=True)
    return results


def main(arguments: list[str] | None = None) -> dict[str, dict]:
    """Run what was asked, print it, and record it where `--json` says; returns the recorded values."""
    parser, asked = parse(arguments)
    torch.set_num_threads(usable_cores())
    with record.refusing(parser):  # both parts, before either is measured
        models, ids = load_quality(asked) if "quality" in asked.parts else ([], {})
        shape = find_shape(asked) if "speed" in asked.parts else None
    values: dict[str, dict] = {}
    if models:
        results = [measure_quality(model, ids, asked.steps, asked.rates) for model in models]
        print(quality_table(results))
        values |= {key: value for result in results for key, value in result.values().items()}
    if shape:
        speeds = run_speed(shape, asked)
        columns = ["batch, context", "KV heads", "a step", ("predicted", "times faster"), ("measured", "times faster")]
        print(Table([row for speed in speeds for row in speed.rows()], columns, f"{asked.shape}, random weights"))
        values |= {f"{asked.shape}_{key}": value for speed in speeds for key, value in speed.values().items()}
    if asked.json:
        record.write(asked.json, command(asked), values, asked.device if "speed" in asked.parts else "cpu")
    return values


def command(asked: argparse.Namespace) -> list:
    """What runs this again, after "python -m"; of files, their names alone."""
    words = ["benchmarks.grouped_heads", "--parts", *asked.parts]
    if "quality" in asked.parts:
        words += ["--text", asked.text.name, "--model", Path(asked.model).name, "--steps", asked.steps]
        words += ["--heads", *asked.heads, "--rates", *(f"{rate:g}" for rate in asked.rates)]
    if "speed" in asked.parts:
        words += ["--shape", asked.shape, "--batch", *asked.batch, "--context", *asked.context]
    return words


if __name__ == "__main__":
    main()
