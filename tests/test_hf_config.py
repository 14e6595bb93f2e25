"""pagedjax.hf_config: published configurations, the forms one setting is written in, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from pagedjax import hf_config
from pagedjax.config import ModelConfig, RopeConfig

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}


def small(model_type: str = "llama", **settings: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SMALL, **settings}


def windows(model_type: str, **settings: Any) -> tuple[int | None, ...] | None:
    return hf_config.model_config(small(model_type, **settings)).sliding_windows


PUBLISHED: dict[str, tuple[dict[str, Any], ModelConfig]] = {
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        },
        ModelConfig(
            *("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5),
            RopeConfig(5e5, "llama3", 32.0, 8192, 1.0, 4.0),
            tie_word_embeddings=True,
        ),
    ),
    "Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        ModelConfig(
            *("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6),
            RopeConfig(1e6),
            qkv_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "Qwen3-0.6B": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        ModelConfig(
            *("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6),
            RopeConfig(1e6),
            qk_norm=True,
            tie_word_embeddings=True,
        ),
    ),
    "SmolLM2-135M": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
        },
        ModelConfig(*("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5), RopeConfig(1e5), tie_word_embeddings=True),
    ),
    "Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
        ModelConfig(
            *("mistral", 32000, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5), RopeConfig(), sliding_windows=(4096,) * 32
        ),
    ),
}
PUBLISHED["Mistral-7B-v0.2"] = (
    {**PUBLISHED["Mistral-7B-v0.1"][0], "sliding_window": None, "rope_theta": 1e6},
    dataclasses.replace(PUBLISHED["Mistral-7B-v0.1"][1], sliding_windows=None, rope=RopeConfig(1e6)),
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    config, expected = PUBLISHED[name]
    assert hf_config.model_config(config) == expected


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 7.0},
        {"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}, "rope_scaling": None},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5, "rope_type": "default"}}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_theta": 5e5},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}},
        {
            "rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}},
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "sliding_window": 8,
        },
    ],
)
def test_where_theta_lives(form: dict[str, Any]) -> None:
    assert hf_config.model_config(small(**form)).rope == RopeConfig(theta=5e5)


def test_theta_defaults() -> None:
    assert hf_config.model_config(small()).rope == RopeConfig(theta=10000.0)


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5, "type": "llama3", **LLAMA3}}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": None},
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": None},
            "max_position_embeddings": 8192,
        },
    ],
)
def test_where_llama3_lives(form: dict[str, Any]) -> None:
    assert hf_config.model_config(small(**form)).rope == RopeConfig(5e5, "llama3", 32.0, 8192, 1.0, 4.0)


def test_yarn_and_dynamic_parameters() -> None:
    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2}
    yarn |= {"attention_factor": 1.5, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False}
    rope = hf_config.model_config(small(rope_scaling=yarn)).rope
    assert rope == RopeConfig(1e4, "yarn", 4.0, 512, 1.0, 4.0, 16.0, 2.0, 1.5, 0.7, 0.9, False)
    inferred = {"type": "yarn", "original_max_position_embeddings": 512}
    rope = hf_config.model_config(small(rope_scaling=inferred, max_position_embeddings=4096)).rope
    assert rope == RopeConfig(kind="yarn", factor=8.0, original_max_position=512)
    dynamic = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 5}
    rope = hf_config.model_config(small(rope_scaling=dynamic, max_position_embeddings=4096)).rope
    assert rope == RopeConfig(kind="dynamic", factor=2.0, original_max_position=4096)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'.*yarn"),
        ({"rope_scaling": {"rope_type": "mrope", "type": "default"}}, "'mrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "su"}}}, "'su'"),
        ({"rope_scaling": {"type": "linear"}}, "linear.*factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"factor": 8.0}}, "factor=8.0.*rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, "factor.*'8'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 1e4}}}, "full_attention"),
        (
            {
                "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "sliding_window": 8,
            },
            "differ between layer types",
        ),
    ],
)
def test_rope_refused(form: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hf_config.model_config(small(**form))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_window_that_is_off_and_one_that_starts_late(model_type: str) -> None:
    assert windows(model_type, sliding_window=8, use_sliding_window=False) is None
    assert windows(model_type, sliding_window=None, use_sliding_window=True) is None
    late = windows(model_type, sliding_window=8, use_sliding_window=True, max_window_layers=2)
    assert late == (None, None, 8, 8)
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    for off in (True, False):  # layer_types wins
        mixed = windows(model_type, sliding_window=8, use_sliding_window=off, max_window_layers=2, layer_types=types)
        assert mixed == (8, None, None, 8)
    assert windows(model_type, sliding_window=8, layer_types=["full_attention"] * 4) is None


def test_windows_by_family_default() -> None:
    assert windows("mistral") == (4096,) * 4
    assert windows("mistral", sliding_window=8) == (8,) * 4
    assert windows("llama", sliding_window=8) is None
    assert windows("qwen2", sliding_window=8) is None
    assert windows("qwen2", sliding_window=8, use_sliding_window=True) is None  # max_window_layers is 28
    assert windows("qwen3", use_sliding_window=True, max_window_layers=3) == (None, None, None, 4096)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"layer_types": ["full_attention"] * 3}, "3 entries for num_hidden_layers=4"),
        ({"layer_types": []}, "0 entries for num_hidden_layers=4"),
        ({"layer_types": "full_attention"}, "'full_attention'.*num_hidden_layers=4"),
        ({"layer_types": ["full_attention"] * 3 + ["global"]}, r"layer_types\[3\] is 'global'.*sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "sliding_window"),
        ({"sliding_window": 0, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window is 0"),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": None}, "max_window_layers is None"),
    ],
)
def test_windows_refused(form: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hf_config.model_config(small("qwen2", **form))


def test_biases_and_norms_by_family() -> None:
    def parts(model_type: str, **settings: Any) -> tuple[bool, ...]:
        config = hf_config.model_config(small(model_type, **settings))
        return config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm

    assert parts("llama") == (False, False, False, False)
    assert parts("llama", attention_bias=True) == (True, True, False, False)
    assert parts("llama", mlp_bias=True) == (False, False, True, False)
    assert parts("mistral", attention_bias=True, mlp_bias=True) == (False, False, False, False)
    assert parts("qwen2") == (True, False, False, False)
    assert parts("qwen2", attention_bias=False) == (True, False, False, False)
    assert parts("qwen3") == (False, False, False, True)
    assert parts("qwen3", attention_bias=True) == (True, True, False, True)


def test_head_counts_and_sizes() -> None:
    assert hf_config.model_config(small(head_dim=16)).head_dim == 16
    assert hf_config.model_config(small(head_dim=None)).head_dim == 8
    assert hf_config.model_config(small("qwen3")).head_dim == 128  # Qwen3Config's default
    assert hf_config.model_config(small("qwen3", head_dim=None)).head_dim == 8
    no_groups = {key: value for key, value in small().items() if key != "num_key_value_heads"}
    assert hf_config.model_config(no_groups).num_kv_heads == 4
    assert hf_config.model_config(small("mistral", num_key_value_heads=None)).num_kv_heads == 4
    assert hf_config.model_config(small()).max_position_embeddings == 2048
    assert hf_config.model_config(small()).rms_norm_eps == 1e-6
    assert hf_config.model_config(small("qwen2")).max_position_embeddings == 32768


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_head_is_untied_unless_said(model_type: str) -> None:
    assert not hf_config.model_config(small(model_type)).tie_word_embeddings
    assert hf_config.model_config(small(model_type, tie_word_embeddings=True)).tie_word_embeddings


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"hidden_size": 33}, "33.*4.*head_dim"),
        ({"num_key_value_heads": 3}, r"\(4\).*\(3\)"),
        ({"head_dim": 7}, "7"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"intermediate_size": -1}, "intermediate_size is -1"),
        ({"hidden_act": "gelu"}, "'gelu'.*silu"),
        ({"hidden_act": None}, "None.*silu"),
        ({"model_type": "gpt2"}, "'gpt2'.*llama.*mistral.*qwen2.*qwen3"),
        ({"model_type": None}, "None.*LlamaForCausalLM"),
        ({"model_type": ["llama"]}, "llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*LlamaForCausalLM"),
    ],
)
def test_sizes_and_architectures_refused(form: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hf_config.model_config(small(**form))


@pytest.mark.parametrize("missing", [*SMALL][:5])
def test_a_missing_size_is_named(missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        hf_config.model_config({key: value for key, value in small().items() if key != missing})


def test_the_class_alone_names_the_family() -> None:
    config = {**small(), "architectures": ["Qwen2ForCausalLM"]}
    del config["model_type"]
    assert hf_config.model_config(config).family == "qwen2"


@pytest.mark.parametrize(
    ("quantisation", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "awq"}, "awq"),
        ({"bits": 4}, "unnamed"),
        ("gptq", "gptq"),
    ],
)
@pytest.mark.parametrize("place", ["outer", "nested", "compression_config"])
def test_quantised_is_refused_by_name(quantisation: Any, name: str, place: str) -> None:
    config = small(**{"compression_config" if place == "compression_config" else "quantization_config": quantisation})
    with pytest.raises(ValueError, match=name):
        hf_config.model_config({"text_config": config} if place == "nested" else config)
    assert hf_config.model_config(small(quantization_config=None)).family == "llama"


def test_nested_text_config() -> None:
    inner = small("mistral", sliding_window=8)
    outer = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": inner,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "eos_token_id": 7,
    }
    parsed = hf_config.parse(outer)
    assert parsed.model == dataclasses.replace(hf_config.model_config(inner), tie_word_embeddings=True)
    assert (parsed.dtype, parsed.eos_token_ids) == ("bfloat16", (7,))
    inner["tie_word_embeddings"] = False
    assert not hf_config.parse(outer).model.tie_word_embeddings
    del inner["model_type"]
    assert hf_config.model_config({**outer, "model_type": "qwen2"}).family == "qwen2"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [5, 2, 5]}, None, (2, 5)),
        ({}, {"eos_token_id": [9, 3]}, (3, 9)),
        ({"eos_token_id": 2}, {"eos_token_id": [9, 3]}, (2, 3, 9)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 63}, {"eos_token_id": 64}, (63,)),  # 64 is no token of this vocabulary
        ({}, {}, ()),
    ],
)
def test_end_tokens(config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    assert hf_config.parse(small(**config), generation).eos_token_ids == expected


@pytest.mark.parametrize("value", ["</s>", -1, [2, None], True, 1.5])
def test_end_tokens_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="eos_token_id"):
        hf_config.parse(small(eos_token_id=value))


def test_start_token_and_dtype() -> None:
    assert hf_config.parse(small(bos_token_id=1)).bos_token_id == 1
    assert hf_config.parse(small()).bos_token_id is None
    for form in ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"torch_dtype": "torch.bfloat16"}):
        assert hf_config.parse(small(**form)).dtype == "bfloat16"
    assert hf_config.parse(small(dtype="float16", torch_dtype="float32")).dtype == "float16"
    assert hf_config.parse(small()).dtype is None
    assert hf_config.parse(small(dtype="auto")).dtype is None
    with pytest.raises(ValueError, match=r"float8_e4m3fn.*bfloat16"):
        hf_config.parse(small(dtype="float8_e4m3fn"))


def test_read_both_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf_config.read(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf_config.read(tmp_path / "absent")
    (tmp_path / "config.json").write_text(json.dumps(small(eos_token_id=2)))
    assert hf_config.read(str(tmp_path)).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    assert hf_config.read(tmp_path).eos_token_ids == (2, 3)
    for content in ('{"model_type": "lla', "[]", "\xff"):
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=r"config\.json"):
            hf_config.read(tmp_path)
