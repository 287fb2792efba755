"""A GGUF file (llama.cpp's, one file for everything): the model's shape, and its tensors dequantized one by one.

The only module that needs the `gguf` package; it is imported where such a file is read.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from minillm.config import ModelConfig, RopeScaling
from minillm.formats import ARCHITECTURES, CheckpointError, Fields, StoredTensor
from minillm.model import scale_frequencies


def open_gguf(file: Path) -> GGUFReader:
    """Read a GGUF file's fields and the places of its tensors."""
    try:
        return _Reader(file)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except (ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{file} is not a whole GGUF file: {error}") from error


def gguf_config(file: Path, reader: GGUFReader) -> ModelConfig:
    """The shape of a llama, qwen2 or qwen3 model, from a GGUF file's fields."""
    stored = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    fields = Fields(file, {k: f.contents() for k, f in reader.fields.items() if not k.startswith("tokenizer.ggml.")})
    fields.allow("general.architecture", *ARCHITECTURES)
    kind = fields.get("general.architecture", str)
    fields.allow(f"{kind}.rope.scaling.type", "none")
    fields.allow(f"{kind}.rope.scaling.factor", 0.0, 1.0)
    fields.allow(f"{kind}.rope.scale_linear", 0.0, 1.0)
    fields.allow(f"{kind}.attention.sliding_window", 0)
    fields.allow(f"{kind}.expert_count", 0)
    fields.allow("split.count", 0, 1)
    dim, n_heads = fields.get(f"{kind}.embedding_length", int), fields.get(f"{kind}.attention.head_count", int)
    head_dim = fields.get(f"{kind}.attention.key_length", int, dim // max(n_heads, 1))
    fields.allow(f"{kind}.attention.value_length", head_dim)
    fields.allow(f"{kind}.rope.dimension_count", head_dim)
    theta = fields.get(f"{kind}.rope.freq_base", float, 10_000.0)
    if "token_embd.weight" not in stored:
        raise CheckpointError(f"{file}: tensor token_embd.weight is missing")
    ends = (reader.fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
    return fields.model_config(
        vocab_size=stored["token_embd.weight"][0],
        dim=dim,
        n_layers=fields.get(f"{kind}.block_count", int),
        n_heads=n_heads,
        n_kv_heads=fields.get(f"{kind}.attention.head_count_kv", int, n_heads),
        head_dim=head_dim,
        ffn_dim=fields.get(f"{kind}.feed_forward_length", int),
        max_context=fields.get(f"{kind}.context_length", int),
        rope_theta=theta,
        norm_eps=fields.get(f"{kind}.attention.layer_norm_rms_epsilon", float),
        tie_embeddings="output.weight" not in stored,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        rope_scaling=_gguf_scaling(file, reader, theta, head_dim),
        eos_token_ids=tuple(dict.fromkeys(int(field.contents()) for field in ends if field is not None)),
    )


def gguf_tensors(file: Path, reader: GGUFReader, config: ModelConfig) -> dict[str, StoredTensor]:
    """Tensors of a GGUF file, dequantized to float32 as they are read, with q and k in our rotary order."""
    interleaved = reader.fields["general.architecture"].contents() == "llama"
    heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}

    def read(tensor) -> torch.Tensor:
        try:
            values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        except NotImplementedError as error:
            raise CheckpointError(f"{file}: tensor {tensor.name}: {error}") from error
        n_heads = heads.get(tensor.name.split(".")[-2]) if interleaved else None
        return values if n_heads is None else halve_rotary_rows(values, n_heads)

    tensors = (t for t in reader.tensors if t.name != "rope_freqs.weight")
    return {t.name: StoredTensor(file, tuple(int(n) for n in reversed(t.shape)), partial(read, t)) for t in tensors}


def halve_rotary_rows(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows [n_heads * D, in] whose rotary pairs are (2i, 2i + 1), as llama.cpp keeps them, to pairs (i, i + D/2)."""
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


class _Reader(GGUFReader):
    """The library's reader, made to name the tensor that a truncated file lacks, and to read in half the time."""

    def _build_fields(self, offs, count):
        self.data = self.data.view(np.ndarray)  # still mapped, but slices of it are plain arrays, which cost less
        return super()._build_fields(offs, count)

    def _build_tensors(self, start_offs, fields):
        for field in fields:
            try:
                super()._build_tensors(start_offs, [field])
            except ValueError as error:
                raise CheckpointError(f"tensor {field.name} is cut off or of an unknown type: {error}") from error
        super()._build_tensors(start_offs, fields)


def _gguf_scaling(file: Path, reader: GGUFReader, theta: float, head_dim: int) -> RopeScaling | None:
    """GGUF stores what Llama 3's scaling does, a divisor for each frequency, not its parameters.

    Every Llama 3 release has low_freq_factor 1, high_freq_factor 4 and an original context of 8,192, and the slowest
    pair is divided by the whole factor. So we take the factor from there, and check that all divisors follow.
    """
    stored = next((t for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if stored is None or (stored.data == 1).all():
        return None
    divisors = torch.tensor(dequantize(stored.data, stored.tensor_type))
    scaling = RopeScaling(divisors.max().item(), low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    expected = frequencies / scale_frequencies(frequencies, scaling)
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-4):
        raise CheckpointError(f"{file}: tensor rope_freqs.weight is a rotary scaling that is not Llama 3's")
    return scaling
