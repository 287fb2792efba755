"""The transformer, written once.

`Transformer.forward(tokens, positions, cache)` takes a flat run of tokens, from one sequence or from
many, and never learns how their keys and values are stored. Every layer hands its queries, keys and
values to `cache.attend(layer, q, k, v)`; what happens there is the subject of the book.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from minillm.config import ModelConfig, RopeScaling
from minillm.linear import Linear


class RMSNorm(nn.Module):
    """Scale x to unit root-mean-square, then by a learned weight (Zhang & Sennrich, 2019)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        # √dim, and the least that √(‖x‖² + eps·dim) can be; their ratio divides by the root-mean-square.
        self.root_dim, self.floor = torch.tensor([dim, eps * dim], device="cpu", dtype=torch.float32).sqrt()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] -> [..., dim]; 16-bit inputs are normalized in float32."""
        if x.dtype == torch.float32 and x.is_cpu and not torch.is_grad_enabled():
            # F.rms_norm is one kernel on a GPU, but many small steps on a CPU; for a few rows these five are faster.
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x * (self.root_dim / torch.hypot(length, self.floor))).mul_(self.weight)
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al., 2021): position p turns pair i by p * theta^(-2i/head_dim).

    Holds a float32 table of cosines and sines [max_context, head_dim]. Pairs are (i, i + head_dim/2).
    """

    def __init__(self, head_dim: int, max_context: int, theta: float, scaling: RopeScaling | None = None):
        super().__init__()
        inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
        if scaling is not None:
            inv_freq = scale_frequencies(inv_freq, scaling)
        angles = torch.outer(torch.arange(max_context, device="cpu").float(), inv_freq)
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.get_default_device())

    def _apply(self, fn, recurse=True):
        # A plain attribute, moved by hand: as a buffer, .to(torch.bfloat16) would round the angles and
        # long positions would drift.
        super()._apply(fn, recurse)
        self.table = self.table.to(fn(self.table).device)
        return self

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cosines and sines for `rotate`, each [T, 1, head_dim], to broadcast over heads.

        Once per step, for all layers: repeated for both halves of a head, and the first half's sines negated.
        """
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def scale_frequencies(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's scaling: slow pairs are slowed further, fast ones kept, the rest blended. [D/2] -> [D/2]."""
    turns = scaling.original_context * inv_freq / (2 * math.pi)  # how often a pair turns in the old context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return inv_freq * keep + inv_freq / scaling.factor * (1 - keep)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of x [T, heads, head_dim] by its position's angle; computed in float32 or wider.

    Pair (a, b) becomes (a cos - b sin, b cos + a sin): x times cosines, plus x with its halves swapped times sines.
    """
    turned = (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023). One product makes queries, keys and values."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.qkv = Linear(config.dim, config.q_dim + 2 * config.kv_dim, bias=config.qkv_bias)
        self.out = Linear(config.q_dim, config.dim)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], layer: int, cache) -> torch.Tensor:
        """x [T, dim] -> [T, dim]."""
        c = self.config
        heads = self.qkv(x).view(-1, c.n_heads + 2 * c.n_kv_heads, c.head_dim)
        qk, v = heads[:, : -c.n_kv_heads], heads[:, -c.n_kv_heads :]
        if self.q_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : c.n_heads]), self.k_norm(qk[:, c.n_heads :])), dim=1)
        qk = rotate(qk, *rope)
        attended = cache.attend(layer, qk[:, : c.n_heads], qk[:, c.n_heads :], v)
        return self.out(attended.reshape(-1, c.q_dim))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x)). One product makes gate and up."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = Linear(config.dim, 2 * config.ffn_dim)
        self.down = Linear(config.ffn_dim, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, dim] -> [T, dim]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """Attention, then feed-forward, each normalized before and added to what came in."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], layer: int, cache) -> torch.Tensor:
        """x [T, dim] -> [T, dim]."""
        x = x + self.attention(self.attention_norm(x), rope, layer, cache)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """A Llama-like decoder (Touvron et al., 2023); also Qwen2 and Qwen3, by their config's switches."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # from_pretrained skips the random start that nn.Embedding would draw, and a loader overwrite.
        self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.dim), freeze=False)
        self.rope = RotaryEmbedding(config.head_dim, config.max_context, config.rope_theta, config.rope_scaling)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache) -> torch.Tensor:
        """Hidden states of a flat run of tokens.

        tokens [T] and positions [T] are integers; `cache` has `attend(layer, q, k, v)` with q [T, n_heads,
        head_dim], k and v [T, n_kv_heads, head_dim], and returns [T, n_heads, head_dim]. Returns [T, dim].
        """
        x = self.embedding(tokens)
        rope = self.rope(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, index, cache)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every next token: hidden [N, dim] -> [N, vocab_size]. Ask only for rows that are sampled."""
        return self.head(hidden)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored in."""
        return self.embedding.weight.dtype

    @torch.no_grad()
    def initialize(self, seed: int = 0) -> Transformer:
        """Random weights, the same for the same seed: normal, 0.02; smaller where a layer adds to its input."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            scale = 0.02
            if name.endswith(("out.weight", "down.weight")):
                scale /= math.sqrt(2 * self.config.n_layers)
            parameter.normal_(0.0, scale, generator=generator)
        return self
