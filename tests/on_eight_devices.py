"""Engines on meshes of host devices. `test_tensor_parallel` runs this in a process that has eight."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import jax
import mesh_models
import mock_engine
import numpy as np
import pytest
from collectives import collectives
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from mesh_models import GREEDY, MODELS, OPTIONS, PROMPTS

import pallas_kernels
from pagedjax import LLM, CompletionOutput, ModelConfig, SamplingParams, block_table, capacity, check_parity
from pagedjax.batch import make_batch
from pagedjax.tensor_parallel import param_shardings, tensor_axis, tensor_parallel
from pallas_kernels import KVPages

# Two KV heads, each on four devices; a head on each; all heads on both. The second is also what two processes have.
SIZES = {"qwen3": 8, "llama": 4, "nine": 2}
CASES = ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "nine"))]


def mesh_of(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), ("devices",))


def trainers_mesh(size: int) -> Mesh:
    """Two axes over all devices, and the kind that `jax.make_mesh` makes."""
    return jax.make_mesh((8 // size, size), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


@functools.cache
def trainer(name: str) -> tuple[Any, Any, Mesh]:
    """A model, and its parameters as a trainer has them: on its mesh, as an engine wants them."""
    graphdef, params = mesh_models.split(name)
    mesh = trainers_mesh(SIZES[name])
    shardings = param_shardings(params, MODELS[name], mesh)
    # Typed as the mesh is; the same places under another name.
    shardings = jax.tree.map(lambda sharding: NamedSharding(mesh, sharding.spec), shardings)
    return graphdef, jax.device_put(params, shardings), mesh


@functools.cache
def engine(name: str) -> LLM:
    graphdef, params, mesh = trainer(name)
    with jax.set_mesh(mesh):  # as within a training loop
        llm = LLM(nnx.merge(graphdef, params), mesh=mesh, **OPTIONS)
        mock_engine.generate(llm, PROMPTS[0], GREEDY)
    return llm


def on_one_device(params: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)), params)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs(name: str) -> None:
    """Prompts in chunks beside rows that decode, with prefix hits; twice, the second time from a fresh state."""
    llm = engine(name)
    params = on_one_device(trainer(name)[1])
    mesh_models.assert_right(name, params, mock_engine.generate(llm, PROMPTS, GREEDY))
    again = mock_engine.generate(llm, PROMPTS, GREEDY)
    assert sum(output.num_cached_tokens for output in again) > 30
    mesh_models.assert_right(name, params, again)
    llm.audit()
    llm._runner.reset()
    llm._engine.scheduler.reset()
    mesh_models.assert_right(name, params, mock_engine.generate(llm, PROMPTS, GREEDY))
    llm.audit()


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_used_where_they_are(name: str) -> None:
    _, params, _ = trainer(name)
    for given, used in zip(jax.tree.leaves(params), jax.tree.leaves(engine(name).params), strict=True):
        assert given is used


@pytest.mark.parametrize("name", CASES)
def test_each_device_has_its_part(name: str) -> None:
    """Of the pool its heads; of the parameters what capacity plans with, to the byte."""
    llm, config, heads = engine(name), MODELS[name], {"qwen3": 1, "nine": 3, "llama": 1}[name]
    pool = llm._runner.state.kv_pages
    whole = KVPages.zeros(2, OPTIONS["num_blocks"], OPTIONS["block_size"], heads, config.head_dim, "float32")
    assert {shard.data.shape for shard in pool.pool.addressable_shards} == {whole.pool.shape}
    assert llm.plan.pool_bytes == whole.nbytes
    assert f"on each of {SIZES[name]} devices" in str(llm.plan)
    planned = capacity.plan(config, "1GiB", dtype="float32", tensor_parallel=SIZES[name], max_model_len=64)
    assert llm.plan.params_bytes == planned.shape.params_bytes


@pytest.mark.parametrize("name", CASES)
def test_what_devices_send_one_another(name: str) -> None:
    """Activations, never a weight or the pool; and the pool is updated in place."""
    llm, config = engine(name), MODELS[name]
    (program,) = (program for key, program in llm._runner._programs.items() if key.startswith("step"))
    most = OPTIONS["max_num_batched_tokens"] * max(2 * config.intermediate_size, config.vocab_size)
    assert most < config.vocab_size * config.hidden_size  # or it would tell nothing
    sent = collectives(program)
    assert sent
    assert max(each.num_elements for each in sent) <= most
    memory = program.memory_analysis()
    pool_bytes = llm.plan.pool_bytes
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes


@pytest.mark.parametrize("name", CASES)
def test_kv_is_exported_whole_and_once(name: str) -> None:
    llm, config = engine(name), MODELS[name]
    prompt = PROMPTS[3]
    llm.add_request("a", prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    while True:
        llm.step()
        k, v = llm.export_kv("a")
        if k.shape[1] >= len(prompt):
            break
    if name == "qwen3":  # the program takes seconds to compile
        llm.defragment()
        np.testing.assert_array_equal(llm.export_kv("a"), (k, v))
    llm.abort("a")
    mock_engine.finish(llm)

    model = nnx.merge(trainer(name)[0], on_one_device(trainer(name)[1]))
    table, _, _ = block_table.append(block_table.create(8, 4, 1, 7), np.array([len(prompt)]))
    pages = KVPages.zeros(2, 8, 4, config.num_kv_heads, config.head_dim, "float32")
    run = nnx.jit(lambda model, tokens, pages, batch: model.paged(tokens, pages, batch)[1])
    pages = run(model, np.array(prompt), pages, make_batch(table, np.array([len(prompt)]), len(prompt)))
    for layer in range(2):
        expected = pallas_kernels.gather_kv(pages, layer, table.block_tables[0], len(prompt))
        for found, want in zip((k, v), expected, strict=True):
            np.testing.assert_allclose(found[layer][: len(prompt)], want[: len(prompt)], rtol=0, atol=1e-4)


def test_new_weights() -> None:
    """On the mesh they are used as they are; those of another place are refused, and the engine goes on."""
    llm, (_, params, mesh) = engine("qwen3"), trainer("qwen3")
    other = jax.tree.map(lambda leaf: leaf * 1.1, params)
    llm.update_params(other)
    mesh_models.assert_right("qwen3", on_one_device(other), mock_engine.generate(llm, PROMPTS, GREEDY))
    with pytest.raises(ValueError, match=r"param_shardings tells how"):
        llm.update_params(on_one_device(params))
    whole = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(ValueError, match=r"parameter layers\.attention\.out\.kernel has NamedSharding"):
        llm.update_params(nnx.State({**params, "layers": whole["layers"]}))
    llm.update_params(jax.tree.map(np.asarray, params))  # from the host
    mesh_models.assert_right("qwen3", on_one_device(params), mock_engine.generate(llm, PROMPTS, GREEDY))
    llm.update_params(params)


def test_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    """KV heads on a device, and how many devices have the same."""
    expected = {(8, 4, 2): (2, 1), (8, 4, 4): (1, 1), (8, 4, 8): (1, 2), (8, 2, 8): (1, 4), (8, 8, 8): (1, 1)}
    for (num_q, num_kv, size), (on_device, copies) in expected.items():
        heads = tensor_parallel(mesh_of(size), ModelConfig("llama", 96, 64, 128, 2, num_q, num_kv, 16, 64)).heads
        assert (heads.axis, heads.num_device_kv_heads, heads.kv_copies) == ("devices", on_device, copies)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        for num_q, num_kv, size in ((9, 3, 4), (9, 3, 4), (12, 2, 8), (12, 6, 4)):
            config = ModelConfig("llama", 96, 64, 128, 3, num_q, num_kv, 16, 64)
            heads = tensor_parallel(mesh_of(size), config).heads
            assert (heads.axis, heads.num_device_kv_heads) == (None, num_kv)
    assert len(caplog.records) == 3, "once for each"


def test_what_does_not_divide_is_whole() -> None:
    config = ModelConfig("llama", 97, 64, 126, 2, 8, 4, 16, 64)
    shapes = {"embed": {"embedding": jax.ShapeDtypeStruct((97, 64), "float32")}}
    shapes["mlp"] = {"down": {"kernel": jax.ShapeDtypeStruct((2, 126, 64), "float32")}}  # type: ignore[dict-item]
    found = param_shardings(shapes, config, mesh_of(4))
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(found))


def test_errors() -> None:
    graphdef, params = mesh_models.split("llama")
    two_axes = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    with pytest.raises(ValueError, match=r"mesh has the axes \('a', 'b'\)"):
        LLM(nnx.merge(graphdef, params), mesh=two_axes, **OPTIONS)
    with pytest.raises(ValueError, match="Mesh of devices"):
        LLM(nnx.merge(graphdef, params), mesh=8, **OPTIONS)
    with pytest.raises(ValueError, match=r"embed\.embedding lies on 8 devices; give the engine their mesh="):
        LLM(nnx.merge(*trainer("qwen3")[:2]), **OPTIONS)
    assert tensor_axis(trainers_mesh(2)) == "tensor"


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


FORMS: dict[str, dict[str, Any]] = {
    "chunks": {"batch_invariant": False, "max_num_batched_tokens": 8},
    "speculation": {"num_speculative_tokens": 3},
    "int8": {"kv_cache_dtype": "int8"},
    "preemption": {"num_blocks": 24, "enable_prefix_caching": False},  # so few that rows make way
}


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
    graphdef, params = mesh_models.split("qwen3")
    options = OPTIONS | FORMS[form]
    one = LLM(nnx.merge(graphdef, params), **options)
    many = LLM(nnx.merge(graphdef, params), mesh=mesh_of(8), **options)
    compare(one, many, PROMPTS, dataclasses.replace(GREEDY, logprobs=2))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_smollm2(size: int, smollm2: LLM) -> None:
    """9 query and 3 KV heads: whole on two devices, a KV head each on three."""
    many = LLM.load("smollm2-135m-instruct", mesh=mesh_of(size), max_num_seqs=8, max_num_batched_tokens=64)
    assert many.plan.block_bytes == smollm2.plan.block_bytes // (1 if size == 2 else 3)
    prompts = ["The capital of France is", "One, two, three,", "def fibonacci(n):"]
    compare(smollm2, many, prompts, SamplingParams(temperature=0.0, max_tokens=24, logprobs=2))
