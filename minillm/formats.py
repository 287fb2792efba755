"""A Hugging Face folder: config.json and safetensors, in one file or several.

Gives a `ModelConfig` and a table of tensors to be read one at a time, under the names they are stored by, as
`gguf_format.py` does for the other format. What our model cannot run as its makers meant it is refused here,
with the file and the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from minillm.config import ModelConfig, RopeScaling

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
    fields = Fields(folder / "config.json", read_json(folder / "config.json"))
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
        where = Fields(index, read_json(index)).get("weight_map", dict)
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


def read_json(file: Path) -> dict:
    """A JSON object from a file; CheckpointError naming the file where there is none."""
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
    generation = Fields(file, read_json(file) if file.exists() else {})
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
