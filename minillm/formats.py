"""What a checkpoint's files hold: the model's shape, and its tensors under the names they are stored by.

Two formats: a Hugging Face folder (config.json and safetensors, in one file or several) and a GGUF file
(llama.cpp's, one file for everything). Each gives a `ModelConfig` and a table of tensors to be read one at a time.
What our model cannot run as its makers meant it is refused here, with the file and the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open

from minillm.config import ModelConfig, RopeScaling
from minillm.model import scale_frequencies

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class CheckpointError(ValueError):
    """A checkpoint that is missing, broken or of a kind we do not run; names the file and the tensor or field."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape is known, its values come with `read()`."""

    file: Path
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Fields:
    """Keys and values of a config; errors name its file."""

    file: Path
    values: dict

    def get(self, key: str, kind: type | tuple, default=None):
        """The value of `key`, or the default where it is absent or null; without a default it must be there."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if kind is float and type(value) is int:  # JSON writers drop the point of 10000.0
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.file}: field {key!r} is {value!r}, which is missing or not of the right kind")
        return value

    def allow(self, key: str, *allowed) -> None:
        """Refuse any other value of `key`; absent or null is allowed."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise CheckpointError(f"{self.file}: {key} = {value!r} is not supported; only {allowed} or absent")

    def model_config(self, **sizes) -> ModelConfig:
        """`ModelConfig(**sizes)`; sizes that do not fit each other are this file's fault."""
        try:
            return ModelConfig(**sizes)
        except ValueError as error:
            raise CheckpointError(f"{self.file}: {error}") from error


def hugging_face_config(folder: Path) -> ModelConfig:
    """The shape of a Llama, Qwen2 or Qwen3 model, from config.json and generation_config.json."""
    fields = Fields(folder / "config.json", _read_json(folder / "config.json"))
    kind = fields.get("model_type", str)
    fields.allow("model_type", *ARCHITECTURES)
    fields.allow("architectures", [ARCHITECTURES[kind]])
    fields.allow("hidden_act", "silu", "swish")
    for key in ("attention_bias", "mlp_bias"):  # Qwen2's own biases, on q, k and v alone, have no key
        fields.allow(key, False)
    fields.allow("quantization_config")
    dim, n_heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
    n_layers = fields.get("num_hidden_layers", int)
    if kind != "llama":
        _refuse_sliding_window(fields, n_layers)
    theta, scaling = _rope(fields)
    return fields.model_config(
        vocab_size=fields.get("vocab_size", int),
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=fields.get("num_key_value_heads", int, n_heads),
        head_dim=fields.get("head_dim", int, 128 if kind == "qwen3" else dim // max(n_heads, 1)),
        ffn_dim=fields.get("intermediate_size", int),
        max_context=fields.get("max_position_embeddings", int),
        rope_theta=theta,
        norm_eps=fields.get("rms_norm_eps", float, 1e-6),
        tie_embeddings=fields.get("tie_word_embeddings", bool, False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        rope_scaling=scaling,
        eos_token_ids=_eos_token_ids(fields),
    )


def hugging_face_tensors(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Tensors of model.safetensors, or of the shards that model.safetensors.index.json lists."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        tensors = _safetensors(single)
    elif index.exists():
        where = Fields(index, _read_json(index)).get("weight_map", dict)
        tensors = {}
        for shard in sorted(set(where.values())):
            names = [name for name, file in where.items() if file == shard]
            if not (folder / shard).is_file():
                raise CheckpointError(f"{folder / shard} is missing; it holds {names[0]} and {len(names) - 1} more")
            found = _safetensors(folder / shard)
            if lost := set(names) - set(found):
                raise CheckpointError(f"{folder / shard}: tensor {min(lost)} is missing, though {index.name} lists it")
            tensors |= found
    else:
        raise CheckpointError(f"{folder} has neither {single.name} nor {index.name}; other formats are not read")
    # Tables that old writers stored and every reader computes; and a tied head, which is the embedding again.
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings and (head := tensors.pop("lm_head.weight", None)) is not None:
        embedding = tensors.get("model.embed_tokens.weight", head)
        if head.shape != embedding.shape or not torch.equal(head.read(), embedding.read()):
            raise CheckpointError(
                f"{head.file}: lm_head.weight is not the embedding, though tie_word_embeddings is set"
            )
    return tensors


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


def _read_json(file: Path) -> dict:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return values


def _refuse_sliding_window(fields: Fields, n_layers: int) -> None:
    """Qwen's configs carry a window that most of them do not use."""
    used = fields.get("use_sliding_window", bool, False) and fields.values.get("sliding_window") is not None
    sliding = used and fields.get("max_window_layers", int, 28) < n_layers
    layers = fields.get("layer_types", list, ["sliding_attention" if sliding else "full_attention"])
    if any(layer != "full_attention" for layer in layers):
        raise CheckpointError(f"{fields.file}: use_sliding_window or layer_types ask for windows; we have none")


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling; `rope_parameters` is what newer files have, `rope_theta` and `rope_scaling` what older do."""
    values = fields.get("rope_scaling", dict, {}) | fields.get("rope_parameters", dict, {})
    rope = Fields(fields.file, {"partial_rotary_factor": fields.values.get("partial_rotary_factor")} | values)
    rope.allow("partial_rotary_factor", 1.0)
    theta = rope.get("rope_theta", float, fields.get("rope_theta", float, 10_000.0))
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind not in ("default", "llama3") or any(isinstance(value, dict) for value in values.values()):
        raise CheckpointError(
            f"{fields.file}: rope_type {kind!r} in {values}: only 'default' and 'llama3' are supported"
        )
    if kind == "default":
        return theta, None
    factors = [rope.get(key, float) for key in ("factor", "low_freq_factor", "high_freq_factor")]
    return theta, RopeScaling(*factors, original_context=rope.get("original_max_position_embeddings", int))


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """generation_config.json knows best: it lists what ends a chat's turn, too."""
    file = fields.file.with_name("generation_config.json")
    generation = Fields(file, _read_json(file) if file.exists() else {})
    source = generation if generation.values.get("eos_token_id") is not None else fields
    ids = source.get("eos_token_id", (int, list), [])
    ids = ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"{source.file}: eos_token_id {ids} holds something that is no token id")
    return tuple(ids)


def _safetensors(file: Path) -> dict[str, StoredTensor]:
    try:
        opened = safe_open(file, "pt")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error
    tensors = {}
    for name, tensor in slices.items():
        if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise CheckpointError(f"{file}: tensor {name} is stored as {tensor.get_dtype()}, which is not supported")
        tensors[name] = StoredTensor(file, tuple(tensor.get_shape()), partial(opened.get_tensor, name))
    return tensors


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
