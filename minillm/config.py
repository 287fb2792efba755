"""The shape of a model and the arithmetic that follows from it; and how an engine batches.

Everything a server must budget for (weights, keys and values, operations) can be computed from a
dozen integers before a single weight is read. This module does that, with no tensor in sight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}
LONGEST_CONTEXT = 2**24  # positions that float32 can tell apart
SCALE_GROUP = 128  # weights that share one 16-bit scale when they are stored in 4 bits


def bits_per_value(dtype) -> int:
    """Bits of one stored value. `dtype` is a `torch.dtype` or its name, "int8" or "int4"."""
    name = str(dtype).removeprefix("torch.")
    if name not in BITS:
        raise ValueError(f"unknown dtype {name!r}; use one of {', '.join(BITS)}")
    return BITS[name]


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches its rotary embedding over a longer context (Llama 3 report, 2024).

    Wavelengths above `original_context / low_freq_factor` are divided by `factor`, those below
    `original_context / high_freq_factor` are kept, those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-like decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Sizes count values, not bytes. `n_heads * head_dim` need not equal `dim` (Qwen3). `qkv_bias` is
    Qwen2's, `qk_norm` Qwen3's. Raises ValueError where the sizes do not fit each other.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    max_context: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        ids = self.eos_token_ids
        if not isinstance(ids, tuple) or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"eos_token_ids must be a tuple of token ids (integers from 0), got {ids!r}")
        if self.max_context > LONGEST_CONTEXT:
            raise ValueError(f"max_context must be at most {LONGEST_CONTEXT:,}, got {self.max_context:,}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads}): "
                "each key/value head serves a whole group of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    @property
    def q_dim(self) -> int:
        """Values in one token's queries: n_heads * head_dim."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Values in one token's keys (or values): n_kv_heads * head_dim."""
        return self.n_kv_heads * self.head_dim

    def num_parameters(self) -> int:
        """Trainable values. Tied embeddings are counted once."""
        attention = self.dim * (self.q_dim + 2 * self.kv_dim) + self.q_dim * self.dim
        attention += (self.q_dim + 2 * self.kv_dim) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.n_layers * layer + embeddings + self.dim

    def weight_bytes(self, dtype="bfloat16") -> float:
        """Bytes of all weights. In "int4" each group of 128 weights adds one 16-bit scale."""
        bits = bits_per_value(dtype) + (16 / SCALE_GROUP if dtype == "int4" else 0)
        return self.num_parameters() * bits / 8

    def kv_bytes_per_token(self, dtype="bfloat16") -> float:
        """Bytes of keys and values that one token leaves behind, over all layers.

        2 (keys and values) * layers * key/value heads * head size * bytes per value.
        """
        return 2 * self.n_layers * self.kv_dim * bits_per_value(dtype) / 8

    def flops_per_token(self, context: int = 0) -> int:
        """Operations (a multiply and an add count as two) to process one token.

        Two per weight, plus two products of attention with `context` keys and values. Norms and biases count like
        products, well under a percent. Looking up the input embedding is a copy and costs none. Raises ValueError
        for a negative context.
        """
        if not context >= 0:
            raise ValueError(f"context must be 0 or more, got {context}")
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.dim
        return 2 * (self.num_parameters() - embedding) + 4 * self.n_layers * self.q_dim * context

    def with_kv_heads(self, n_kv_heads: int) -> ModelConfig:
        """The same model with another number of key/value heads."""
        return replace(self, n_kv_heads=n_kv_heads)

    @staticmethod
    def preset(name: str) -> ModelConfig:
        """A named shape; raises ValueError that lists the names."""
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; there are {', '.join(sorted(PRESETS))}")
        return PRESETS[name]


@dataclass(frozen=True)
class EngineConfig:
    """How an engine batches and keeps its cache. Raises ValueError naming the setting that makes no sense.

    block_size: tokens a block. num_blocks: blocks of the pool; None takes what memory allows. max_batch_size: samples
    that run at once. token_budget: tokens a step, decodes first; a batch is never larger than the budget, so that
    every running request advances at every step. batching: "continuous", or "static", where a batch starts and
    leaves together. reserve: "on_demand" gives a request its blocks as it grows, "max_context" all it could ever need
    before it starts. chunked_prefill: long prompts are computed in parts; without it a prompt is one step's work,
    however long. prefix_caching: blocks of finished requests serve those that start alike. order: "arrival", or
    "prefix", which takes the waiting request with the longest cached start first, until one has been overtaken
    as often as a batch has places.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_batch_size: int = 64
    token_budget: int = 512
    batching: str = "continuous"
    reserve: str = "on_demand"
    chunked_prefill: bool = True
    prefix_caching: bool = True
    order: str = "arrival"

    def __post_init__(self):
        for name in ("block_size", "num_blocks", "max_batch_size", "token_budget"):
            value = getattr(self, name)
            if name == "num_blocks" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        choices_of = {
            "batching": ("continuous", "static"),
            "reserve": ("on_demand", "max_context"),
            "order": ("arrival", "prefix"),
        }
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("chunked_prefill", "prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")


PRESETS = {
    # The model worked through in the source article: 24 layers, 20 query heads, 4 key/value heads of
    # size 64. The article gives neither vocabulary nor feed-forward width. A vocabulary of 50,432
    # (GPT-2's, padded to a multiple of 256), tied, and a width of 3,584 (2.8 * dim) make its 489.3M.
    "post-0.5b": ModelConfig(
        vocab_size=50_432, dim=1280, n_layers=24, n_heads=20, n_kv_heads=4, head_dim=64, ffn_dim=3584, max_context=2048
    ),
    # SmolLM2-135M-Instruct (Hugging Face, 2024), the chat model that the book runs.
    "smollm2": ModelConfig(
        vocab_size=49_152,
        dim=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        ffn_dim=1536,
        max_context=8192,
        rope_theta=100_000.0,
        eos_token_ids=(2,),
    ),
    # The models trained by minillm/checkpoints/train.py; they share a tokenizer. `tiny-mha` is `tiny` with a
    # key/value head for every query head, for chapter 4.
    "tiny": ModelConfig(
        vocab_size=4096,
        dim=256,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        head_dim=32,
        ffn_dim=688,
        max_context=512,
        eos_token_ids=(0,),
    ),
    "tiny-mha": ModelConfig(
        vocab_size=4096,
        dim=256,
        n_layers=6,
        n_heads=8,
        n_kv_heads=8,
        head_dim=32,
        ffn_dim=688,
        max_context=512,
        eos_token_ids=(0,),
    ),
    "draft": ModelConfig(
        vocab_size=4096,
        dim=96,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        head_dim=24,
        ffn_dim=256,
        max_context=512,
        eos_token_ids=(0,),
    ),
}
