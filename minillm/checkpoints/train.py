"""Trains the small models that ship with the package, on two CPU cores.

    apt-get download r-cran-janeaustenr                  # or use any folder of .txt files
    python -m minillm.checkpoints.train tiny  --text r-cran-janeaustenr_1.0.0-1_all.deb
    python -m minillm.checkpoints.train tiny-mha --text r-cran-janeaustenr_1.0.0-1_all.deb
    python -m minillm.checkpoints.train draft --text r-cran-janeaustenr_1.0.0-1_all.deb
    python -m minillm.checkpoints.train card  --text r-cran-janeaustenr_1.0.0-1_all.deb

`tiny` learns the text, and so does `tiny-mha`, half as long, with a key/value head for every query head (for
chapter 4). `draft` learns the text and what `tiny` predicts there, so that it guesses what
`tiny` would say. `card` measures all and writes the model card. Seeded; an interrupted run goes on
where it stopped (`--work` holds its state).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from tqdm import tqdm

from minillm.checkpoints import corpus
from minillm.config import ModelConfig
from minillm.kv_cache import generate
from minillm.model import Transformer
from minillm.naive import NoCache
from minillm.sampling import SamplingParams
from minillm.weights import load_model, save_model

HERE = Path(__file__).parent
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """How one model is trained. Tokens a step: batch * max_context of the model."""

    steps: int
    batch: int = 4
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.15
    seed: int = 0
    distill: float = 0.0  # share of the loss that is the divergence from `tiny`'s own distribution

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup)))


RECIPES = {
    "tiny": Recipe(steps=3000),
    "tiny-mha": Recipe(steps=1500),
    "draft": Recipe(steps=1500, learning_rate=4e-3, dropout=0.0, distill=0.9),
}
CARD = """# Small models of one author

They write in the manner of Jane Austen. They are small enough to be exact in float32 on any laptop, and good
enough that quantization, speculation and perplexity mean something. They share a tokenizer (byte-level BPE,
{vocab:,} tokens) and load in `transformers` as Llama models. `tiny-mha` is `tiny` with a key/value head for every
query head, to be converted in chapter 4.

{table}

Acceptance rate of `draft` against `tiny` on the test chapters, the mean of Σ min(p, q) at temperature 1
(Leviathan et al., 2022): **{acceptance:.3f}**. `draft` was trained on the text and on what `tiny` predicts there.

**Data.** Austen's six novels, from the package janeaustenr {version} as Debian ships it: the text is in the
public domain, the package under the MIT licence. Of each 20 chapters one is kept for validation
(`validation.txt`) and one for test (`test.txt`); neither the models nor the tokenizer saw them. Windows of
{context} tokens do not overlap, so the first tokens of each are guessed with little to go by.

**Licence.** The weights are made from text in the public domain and carry no conditions of their own (CC0 1.0).
**Limits.** Not for any use but teaching: the models know six novels and nothing else, and repeat themselves
when decoded greedily.

**Made by** `python -m minillm.checkpoints.train` (see there), float32 on two CPU cores, stored in float16.

A sample of `tiny` at temperature 0.8, top_p 0.95, seed 1, after "{prompt}":

> {sample}
"""


def train_tokenizer(chapters: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over the training chapters; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, chapters: list[str]) -> torch.Tensor:
    """All chapters as one run of ids [N], each ended by id 0."""
    return torch.tensor([i for chapter in chapters for i in [*tokenizer.encode(chapter).ids, 0]])


def batch_at(ids: torch.Tensor, step: int, recipe: Recipe, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step, each [batch * context]; depends on seed and step alone."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    starts = torch.randint(len(ids) - context - 1, (recipe.batch, 1), generator=generator)
    windows = ids[starts + torch.arange(context + 1)]
    return windows[:, :-1].flatten(), windows[:, 1:].flatten()


def run(model: Transformer, tokens: torch.Tensor, context: int) -> torch.Tensor:
    """Logits [B * context, vocab] of B sequences of `context` tokens."""
    count = len(tokens) // context
    positions = torch.arange(context).repeat(count)
    return model.logits(model(tokens, positions, NoCache([context] * count)))


def add_dropout(model: Transformer, rate: float) -> None:
    """Drop values of the embedding and of what each layer adds, while training. The model itself has no dropout."""

    def drop(module, inputs, output):
        return F.dropout(output, rate) if torch.is_grad_enabled() else output

    for module in [model.embedding, *(m for layer in model.layers for m in (layer.attention.out, layer.ffn.down))]:
        module.register_forward_hook(drop)


def loss_of(model: Transformer, inputs, targets, context: int, target_model, share: float) -> torch.Tensor:
    """Cross-entropy with the text, blended with the divergence from the target model's distribution."""
    logits = run(model, inputs, context)
    loss = F.cross_entropy(logits, targets)
    if target_model is None:
        return loss
    with torch.no_grad():
        wanted = run(target_model, inputs, context).log_softmax(-1)
    divergence = F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
    return (1 - share) * loss + share * divergence


@torch.no_grad()
def cross_entropy(model: Transformer, ids: torch.Tensor, context: int) -> float:
    """Mean nats a token over consecutive windows of `context` tokens (the last, short one left out)."""
    windows = (len(ids) - 1) // context
    inputs, targets = ids[: windows * context].view(windows, context), ids[1 : windows * context + 1].view(windows, -1)
    losses = [F.cross_entropy(run(model, i, context), t) for i, t in zip(inputs, targets, strict=True)]
    return torch.stack(losses).mean().item()


@torch.no_grad()
def acceptance_rate(target: Transformer, draft: Transformer, ids: torch.Tensor, context: int) -> float:
    """Chance that the target accepts the draft's proposal: the mean of sum(min(p, q)) (Leviathan et al., 2022)."""
    windows = ids[: len(ids) // context * context].view(-1, context)
    overlap = [torch.minimum(run(target, w, context).softmax(-1), run(draft, w, context).softmax(-1)).sum(-1).mean()
               for w in windows]  # fmt: skip
    return torch.stack(overlap).mean().item()


def save_state(path: Path, model: Transformer, optimizer: torch.optim.Optimizer, step: int, log: list) -> None:
    """Everything needed to go on, without pickle. Written aside first, so that an interruption leaves a whole file."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    save_file(tensors, path.with_suffix(".partial"), metadata={"step": str(step), "log": json.dumps(log)})
    path.with_suffix(".partial").replace(path)


def load_state(path: Path, model: Transformer, optimizer: torch.optim.Optimizer) -> tuple[int, list]:
    """Undo `save_state`; returns the step to go on with and the log."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    state: dict[int, dict] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(metadata["step"]), json.loads(metadata["log"])


def make_optimizer(model: Transformer, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def update(model, optimizer, recipe, step, ids, context, compute, target_model=None) -> torch.Tensor:
    """One step on its windows of `ids` [N]; returns its loss. `compute` is `loss_of`, compiled or not."""
    for group in optimizer.param_groups:
        group["lr"] = recipe.learning_rate_at(step)
    inputs, targets = (x.to(model.device) for x in batch_at(ids, step, recipe, context))
    loss = compute(model, inputs, targets, context, target_model, recipe.distill)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def train(config: ModelConfig, recipe: Recipe, ids: dict, work: Path, target_model=None, every=200) -> Transformer:
    """Train from scratch or from the state in `work`; `ids` has "train" and "validation" runs of tokens."""
    model, context = Transformer(config).initialize(recipe.seed), config.max_context
    optimizer = make_optimizer(model, recipe)
    add_dropout(model, recipe.dropout)
    state, step, log = work / "state.safetensors", 0, []
    work.mkdir(parents=True, exist_ok=True)
    if state.exists():
        step, log = load_state(state, model, optimizer)
    compute = torch.compile(loss_of) if shutil.which("g++") and recipe.steps - step > 500 else loss_of
    with tqdm(total=recipe.steps, initial=step, unit="step") as bar:
        while step < recipe.steps:
            torch.manual_seed(recipe.seed * 1_000_003 + step)
            loss = update(model, optimizer, recipe, step, ids["train"], context, compute, target_model)
            step += 1
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}")
            if step % every == 0 or step == recipe.steps:
                held_out = cross_entropy(model, ids["validation"][: 20 * context], context)
                log.append({"step": step, "train": round(loss.item(), 4), "validation": round(held_out, 4)})
                bar.write(json.dumps(log[-1]))
                save_state(state, model, optimizer, step, log)
    return model


def prepare(text: str, out: Path) -> tuple[Tokenizer, dict[str, torch.Tensor], dict[str, int]]:
    """Split the text, train the tokenizer once, write what ships; returns tokenizer, runs of ids, bytes of each."""
    parts, file = corpus.split(text), out / "tokenizer.json"
    if not file.exists():
        train_tokenizer(parts["train"], ModelConfig.preset("tiny").vocab_size).save(str(file))
    for name in ("validation", "test"):
        (out / f"{name}.txt").write_text("\n\n".join(parts[name]) + "\n", encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(file))
    ids = {name: encode(tokenizer, chapters) for name, chapters in parts.items()}
    return tokenizer, ids, {name: sum(len(chapter.encode()) for chapter in c) for name, c in parts.items()}


def write_card(tokenizer: Tokenizer, ids: dict, num_bytes: dict, out: Path) -> None:
    """Measure both models and write README.md."""
    models = {name: load_model(out / name, "cpu", "float32") for name in RECIPES}
    table = ["", "---", "parameters", "layers × dim", "query / key/value heads", "training steps × tokens"]
    table += ["perplexity a token, test chapters", "bits per byte, test chapters", "bits per byte, validation chapters"]
    rows = [[title] for title in table]
    context, prompt = models["tiny"].config.max_context, "It was not in her nature"
    params = SamplingParams(max_tokens=120, temperature=0.8, top_p=0.95, seed=1)
    sample = tokenizer.decode(generate(models["tiny"], tokenizer.encode(prompt).ids, params))
    facts = {"vocab": tokenizer.get_vocab_size(), "context": context, "prompt": prompt, "version": "1.0.0-1"}
    acceptance = acceptance_rate(models["tiny"], models["draft"], ids["test"], context)
    facts |= {"sample": " ".join(sample.split()), "acceptance": acceptance}
    for name, model in models.items():
        c, recipe = model.config, RECIPES[name]
        nats = {part: cross_entropy(model, ids[part], context) for part in ("validation", "test")}
        bits = {part: n / math.log(2) * len(ids[part]) / num_bytes[part] for part, n in nats.items()}
        column = [name, "---", f"{c.num_parameters():,}", f"{c.n_layers} × {c.dim}", f"{c.n_heads} / {c.n_kv_heads}"]
        column += [f"{recipe.steps:,} × {recipe.batch * context:,}", f"{math.exp(nats['test']):.1f}"]
        column += [f"**{bits['test']:.3f}**", f"{bits['validation']:.3f}"]
        for row, cell in zip(rows, column, strict=True):
            row.append(cell)
    facts["table"] = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    (out / "README.md").write_text(CARD.format(**facts), encoding="utf-8")


def main(arguments: list[str]) -> None:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m minillm.checkpoints.train", description="Train a small model.")
    parser.add_argument("what", choices=[*RECIPES, "card"])
    parser.add_argument("--text", required=True, help="a folder of .txt files, or the .deb of r-cran-janeaustenr")
    parser.add_argument("--out", type=Path, default=HERE, help="where models, tokenizer and held-out text go")
    parser.add_argument("--work", type=Path, default=Path("training"), help="where an interrupted run goes on from")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    tokenizer, ids, num_bytes = prepare(asked.text, asked.out)
    if asked.what == "card":
        write_card(tokenizer, ids, num_bytes, asked.out)
        return
    target = load_model(asked.out / "tiny", "cpu", "float32") if asked.what == "draft" else None
    model = train(ModelConfig.preset(asked.what), RECIPES[asked.what], ids, asked.work / asked.what, target)
    save_model(model, asked.out / asked.what)


if __name__ == "__main__":
    main(sys.argv[1:])
