"""Loading a model into an engine: every checkpoint form gives the same tokens."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, Decoder, SamplingParams
from pagedjax.loaders import checkpoint, hf, orbax

TINY = pathlib.Path(__file__).parent / "data" / "tiny"
OPTIONS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "num_blocks": 40,
    "batch_invariant": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)


def tokens(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.load(TINY / "llama_llama3" / "reference.npz")["tokens"][:20].tolist()


@pytest.fixture(scope="module")
def loaded() -> LLM:
    return LLM.load(TINY / "llama_llama3", "float32", **OPTIONS)


def greedy_by_hand(prompt: list[int]) -> list[int]:
    """The dense forward of the whole text again for every token."""
    config, params = hf.load(TINY / "llama_llama3", "float32")
    model = Decoder.abstract(config)
    nnx.update(model, nnx.State(jax.tree.map(jnp.asarray, params)))
    forward = nnx.jit(model)
    text = [*prompt, *[0] * 8]
    for place in range(len(prompt), len(text)):
        text[place] = int(jnp.argmax(forward(jnp.asarray([text]))[0, place - 1]))
    return text[len(prompt) :]


def test_the_engine_generates_what_the_dense_forward_predicts(loaded: LLM, prompt: list[int]) -> None:
    assert tokens(loaded, prompt) == greedy_by_hand(prompt)


def test_a_folder_without_a_tokenizer_takes_token_ids(prompt: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM.load(TINY / "qwen2", **OPTIONS)
    assert "tokenizer.json" in caplog.text
    with pytest.raises(ValueError, match="needs a tokenizer"):
        llm.generate("hello")


def test_on_a_cpu_the_loaded_arrays_are_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy of the weights would be there while the pool is made."""
    arrays: list[np.ndarray] = []

    def load(*arguments: Any) -> checkpoint.Checkpoint:
        found = checkpoint.load_checkpoint(*arguments)
        arrays.extend(jax.tree.leaves(found.params))
        return found

    monkeypatch.setattr("pagedjax.llm.load_checkpoint", load)
    llm = LLM.load(TINY / "llama_llama3", "float32", **OPTIONS)
    addresses = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(llm._runner.params)}
    assert addresses == {array.ctypes.data for array in arrays}


def test_an_orbax_checkpoint_gives_the_same(loaded: LLM, prompt: list[int], tmp_path: pathlib.Path) -> None:
    config, params = hf.load(TINY / "llama_llama3", "float32")
    orbax.save(tmp_path / "checkpoint", config, params)
    assert tokens(LLM.load(tmp_path / "checkpoint", **OPTIONS), prompt) == tokens(loaded, prompt)


def test_end_tokens_come_from_the_checkpoint(loaded: LLM, prompt: list[int], tmp_path: pathlib.Path) -> None:
    """With the third greedy token named as an end token in generation_config.json, it ends the generation."""
    third = tokens(loaded, prompt)[2]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((TINY / "llama_llama3" / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{third}]}}')
    llm = LLM.load(tmp_path, "float32", **OPTIONS)
    output = llm.generate(prompt, dataclasses.replace(GREEDY, ignore_eos=False), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == tokens(loaded, prompt)[: output.token_ids.index(third) + 1]
    assert output.finish_reason == "stop"
    assert output.stop_reason is None


def test_a_trainers_parameters_are_used_as_they_are(loaded: LLM, prompt: list[int]) -> None:
    config, params = hf.load(TINY / "llama_llama3", "float32")
    model = Decoder.abstract(config)
    nnx.update(model, nnx.State(jax.tree.map(jnp.asarray, params)))
    state = nnx.state(model)
    llm = LLM(model, params=state, **OPTIONS)
    mine = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(llm._runner.params)] == mine
    assert tokens(llm, prompt) == tokens(loaded, prompt)
    other = jax.tree.map(lambda x: x * 1.01, state)
    llm.update_params(other)
    assert jax.tree.leaves(llm._runner.params)[0] is jax.tree.leaves(other)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["embed"].pop("embedding"), r"missing \['embed.embedding'\]"),
        (lambda p: p.update(extra=np.zeros(3)), r"unexpected \['extra'\]"),
        (lambda p: p["final_norm"].update(scale=np.zeros(5, np.float32)), r"final_norm.scale is float32\[5\]"),
        (lambda p: p["final_norm"].update(scale=np.zeros(32, np.float16)), "final_norm.scale is float16"),
    ],
)
def test_parameters_that_do_not_fit_are_named(change: object, message: str) -> None:
    config, params = hf.load(TINY / "llama_llama3", "float32")
    change(params)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        LLM(Decoder.abstract(config), params=params, **OPTIONS)


def test_abstract_parameters_are_refused() -> None:
    config, _ = hf.load(TINY / "llama_llama3", "float32")
    with pytest.raises(ValueError, match="is a shape without values; pass params="):
        LLM(Decoder.abstract(config), **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqs": 4}, r"unknown engine options \['max_seqs'\]"),
        ({"num_blocks": 1}, "num_blocks=1 is too small"),
        ({"block_size": 0}, "block_size=0 is too small"),
        ({"max_num_seqs": True}, "max_num_seqs=True is not an integer"),
        ({"num_blocks": 9, "kv_cache_memory_bytes": 10**6}, "both size the pool"),
        ({"kv_cache_memory_bytes": 10}, "raise kv_cache_memory_bytes"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' is not one of"),
        ({"attention": "cuda"}, "attention='cuda' is not one of"),
        ({"num_speculative_tokens": 8, "max_num_batched_tokens": 8}, "do not fit a step of max_num_batched_tokens=8"),
        ({"watermark": 1.0}, "watermark=1.0 is not in"),
        ({"memory_utilization": 0.0}, "memory_utilization=0.0 is not in"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM.load(TINY / "llama_llama3", **options)


def test_the_plan_is_readable(loaded: LLM) -> None:
    text = str(loaded.plan)
    for part in ("KV pool", "40 blocks of 16 tokens", "programs", "step[32]"):
        assert part in text


def test_one_shape_gives_the_same_bits_whoever_runs_beside(loaded: LLM, prompt: list[int]) -> None:
    prompts = [prompt[:5], prompt[3:12], prompt[8:20], prompt[:9]]
    alone = [loaded.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].logprobs for p in prompts]
    together = [output.outputs[0].logprobs for output in loaded.generate(prompts, GREEDY, use_tqdm=False)]
    assert together == alone
