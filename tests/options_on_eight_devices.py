"""Engines on meshes of host devices say what an engine on one device says, whatever is asked of them.

`test_tensor_parallel` runs this, after `on_eight_devices`, in the same process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import mesh_models
import mock_engine
import numpy as np
import pytest
from flax import nnx
from mesh_models import GREEDY, MODELS, OPTIONS, PROMPTS
from on_eight_devices import CASES, engine, mesh_of, trainer

import pallas_kernels
from pagedjax import (
    LLM,
    BeamSearchParams,
    CompletionOutput,
    Decoder,
    ModelConfig,
    SamplingParams,
    block_table,
    check_parity,
)
from pagedjax.snapshot import raw_blocks
from pagedjax.tensor_parallel import tensor_parallel
from pallas_kernels import KVPages


@functools.cache
def alone(name: str, **options: Any) -> LLM:
    graphdef, params = mesh_models.split(name)
    return LLM(nnx.merge(graphdef, params), **OPTIONS | options)


def compare(one: LLM, many: LLM, prompts: Any, asked: SamplingParams) -> None:
    """What they say is equal up to where the margin between the two most likely tokens leaves a doubt."""
    outputs = zip(mock_engine.generate(one, prompts, asked), mock_engine.generate(many, prompts, asked), strict=True)
    for expected, found in outputs:
        for sample, other in zip(expected.outputs, found.outputs, strict=True):
            compare_samples(sample, other)
    many.audit()


def compare_samples(sample: CompletionOutput, other: CompletionOutput) -> None:
    assert sample.logprobs is not None
    for place, entry in enumerate(sample.logprobs):
        if sample.token_ids[place] != other.token_ids[place]:
            first, second = sorted(entry.values(), reverse=True)[:2]
            assert first - second <= mesh_models.CLEAR
            return
    assert other.cumulative_logprob == pytest.approx(sample.cumulative_logprob, abs=1e-3)


# Every call


@pytest.mark.parametrize("name", CASES)
def test_every_call_as_on_one_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = alone(name), engine(name)
    searched = [
        llm.beam_search(PROMPTS[:2], BeamSearchParams(width=2, max_tokens=5), use_tqdm=False) for llm in (one, many)
    ]
    for expected, found in zip(*searched, strict=True):
        best, second = (sample.cumulative_logprob for sample in expected.outputs)
        assert best - second > mesh_models.CLEAR
        for sample, other in zip(expected.outputs, found.outputs, strict=True):
            assert other.token_ids == sample.token_ids
            assert other.cumulative_logprob == pytest.approx(sample.cumulative_logprob, abs=1e-3)

    scores = [llm.score(PROMPTS[0], [[1, 2, 3], [4], PROMPTS[3]]) for llm in (one, many)]
    for expected, found in zip(*scores, strict=True):
        np.testing.assert_allclose(found.token_logprobs, expected.token_logprobs, rtol=0, atol=1e-3)
        assert found.is_greedy == expected.is_greedy

    asked = dataclasses.replace(mesh_models.sampled(2), temperature=0.7)
    expected, found = (llm.rollout(PROMPTS, asked, use_tqdm=False).arrays(pad_to=40) for llm in (one, many))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    for field in ("logprobs", "sampled_logprobs", "kept_masses"):
        np.testing.assert_allclose(getattr(found, field), getattr(expected, field), rtol=0, atol=1e-3)

    texts = []
    for llm in (one, many):
        mock_engine.use_tokenizer(monkeypatch, llm, mock_engine.Pieces({i: f"<{i}>" for i in range(96)}))
        texts.append("".join(llm.stream(PROMPTS[2], GREEDY)))
    assert texts[0] == texts[1] != ""

    for llm in (one, many):
        for index, prompt in enumerate(PROMPTS):
            llm.add_request(str(index), prompt, dataclasses.replace(GREEDY, logprobs=2))
        llm.step()
        llm.abort("0")  # leaves a gap
        llm.step()
        llm.defragment()
    np.testing.assert_allclose(many.export_kv("1"), one.export_kv("1"), rtol=0, atol=1e-4)
    ends = [mock_engine.finish(llm) for llm in (one, many)]
    for index in ("1", "2", "3", "4"):
        compare_samples(ends[0][index].outputs[0], ends[1][index].outputs[0])
    many.audit()


# Saved states


@pytest.mark.parametrize("name", CASES)
def test_a_saved_state_goes_on_elsewhere(name: str, tmp_path: pathlib.Path) -> None:
    """On the mesh and on one device, saved on either; with K/V, which is the same to the bit, and without."""
    engines = {"one": alone(name), "many": engine(name)}
    asked = dataclasses.replace(mesh_models.sampled(2), logprobs=2)
    for source, llm in engines.items():
        generated = mock_engine.generate(llm, PROMPTS[1], asked)[0].outputs
        llm.add_request("a", PROMPTS[1], asked)
        while not llm._engine.requests["a"].sequences[1].output_ids:
            llm.step()
        for kv in (False, True):
            llm.save_state(tmp_path / f"{source}_{kv}", include_kv=kv)
        held = [llm.export_kv("a", index) for index in (0, 1)]
        llm.abort("a")
        mock_engine.finish(llm)
        for target, other in engines.items():
            for kv in (False, True):
                with jax.set_mesh(trainer(name)[2]) if target == "many" else contextlib.nullcontext():
                    assert other.load_state(tmp_path / f"{source}_{kv}") == ["a"]
                if kv:
                    block_table.check(other._runner.state.table)
                    np.testing.assert_array_equal([other.export_kv("a", index) for index in (0, 1)], held)
                samples = mock_engine.finish(other)["a"].outputs
                for found, expected in zip(samples, generated, strict=True):
                    compare_samples(expected, found)
                other.audit()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_q", "num_kv", "size"),
    [
        ("float32", 16, 8, 4, 8),  # a head on two devices
        ("int8", 128, 8, 2, 8),  # on four
        ("int8", 16, 8, 4, 2),
        ("bfloat16", 128, 8, 4, 4),
        ("float8_e4m3fn", 16, 9, 3, 2),  # all on all
    ],
)
def test_raw_blocks(dtype: str, head_dim: int, num_q: int, num_kv: int, size: int) -> None:
    """From a pool on one device to one on a mesh, where the heads are where they belong, and back."""
    heads = tensor_parallel(mesh_of(size), ModelConfig("llama", 96, 64, 128, 2, num_q, num_kv, head_dim, 64)).heads
    pages = KVPages.zeros(2, 9, 4, num_kv, head_dim, dtype)
    rng = np.random.default_rng(0)
    pages = jax.tree.map(lambda leaf: jnp.asarray(rng.integers(-99, 99, leaf.shape), leaf.dtype), pages)
    block_ids = [5, 3, 8, 1, 2]
    blocks = raw_blocks.read_blocks(pages, block_ids)
    with jax.set_mesh(heads.mesh):
        divided = jax.jit(lambda: heads.zeros(2, 7, 4, head_dim, dtype))()
    divided = raw_blocks.write_blocks(divided, blocks, heads)
    assert raw_blocks.layout(divided, heads) == raw_blocks.layout(pages)
    for layer in range(2):
        found = heads.gather(divided, layer, np.arange(1, 6), 20)
        expected = pallas_kernels.gather_kv(pages, layer, np.array(block_ids), 20)
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    for found, expected in zip(raw_blocks.read_blocks(divided, [1, 2, 3, 4, 5], heads), blocks, strict=True):
        np.testing.assert_array_equal(found, expected)


# Every option

FORMS: dict[str, dict[str, Any]] = {
    "chunks": {"batch_invariant": False, "max_num_batched_tokens": 8},
    "speculation": {"num_speculative_tokens": 3},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "preemption": {"num_blocks": 24, "enable_prefix_caching": False},  # so few that rows make way
    "windows": {},
    "a window in a layer": {},
}
WINDOWS = {"windows": (8, 8), "a window in a layer": (8, None)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_as_on_one_device(name: str) -> None:
    """Greedy and sampled, with forks."""
    graphdef, params = mesh_models.split(name)
    one = LLM(nnx.merge(graphdef, params), **OPTIONS)
    for size in (2, 4, 8):
        many = LLM(nnx.merge(graphdef, params), mesh=mesh_of(size), **OPTIONS)
        for asked in (GREEDY, mesh_models.sampled(), mesh_models.sampled(3)):
            compare(one, many, PROMPTS, dataclasses.replace(asked, logprobs=2))
        assert check_parity(many, many.params, PROMPTS).max_difference < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_options_as_on_one_device(form: str) -> None:
    config = dataclasses.replace(MODELS["qwen3"], sliding_windows=WINDOWS.get(form))
    graphdef, params = nnx.split(Decoder.abstract(config))[0], mesh_models.split("qwen3")[1]
    options = OPTIONS | FORMS[form]
    one = LLM(nnx.merge(graphdef, params), **options)
    many = LLM(nnx.merge(graphdef, params), mesh=mesh_of(8), **options)
    compare(one, many, PROMPTS, dataclasses.replace(GREEDY, logprobs=2))
    if form == "speculation":
        asked = SamplingParams(n=2, temperature=0.4, top_k=5, max_tokens=12, seed=3)
        expected, found = (llm.rollout([[7, 8] * 6, [1, 2]], asked, use_tqdm=False).arrays() for llm in (one, many))
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.sampled_logprobs, expected.sampled_logprobs, rtol=0, atol=1e-3)
        assert many.stats().num_accepted_tokens == one.stats().num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_smollm2(size: int, smollm2: LLM) -> None:
    """9 query and 3 KV heads: whole on two devices, a KV head each on three."""
    many = LLM.load("smollm2-135m-instruct", mesh=mesh_of(size), max_num_seqs=8, max_num_batched_tokens=64)
    assert many.plan.block_bytes == smollm2.plan.block_bytes // (1 if size == 2 else 3)
    prompts = ["The capital of France is", "One, two, three,", "def fibonacci(n):"]
    compare(smollm2, many, prompts, SamplingParams(temperature=0.0, max_tokens=24, logprobs=2))
