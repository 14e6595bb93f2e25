"""Engines on meshes of host devices: what lies and goes where. `test_tensor_parallel` runs this in a process that has
eight."""

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
from pagedjax import (
    LLM,
    Decoder,
    ModelConfig,
    SamplingParams,
    block_table,
    capacity,
)
from pagedjax.batch import Batch, make_batch
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


def test_the_dense_forward_of_a_trainers_parameters() -> None:
    """Whose mesh has typed axes; none of them is copied."""
    graphdef, params, mesh = trainer("qwen3")
    tokens = np.array([PROMPTS[3]])
    expected = nnx.merge(graphdef, on_one_device(params))(tokens)
    used: list[Any] = []

    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        used.extend(jax.tree.leaves(params))
        return jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))(params, tokens)

    parallel = tensor_parallel(mesh, MODELS["qwen3"])
    with jax.set_mesh(mesh):
        found = parallel.apply(forward, params, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    for leaf, given in zip(used, jax.tree.leaves(params), strict=True):
        pointers = [[part.data.unsafe_buffer_pointer() for part in x.addressable_shards] for x in (leaf, given)]
        assert pointers[0] == pointers[1]


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
    assert tensor_axis(jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)) == "tp"


class _Direct(Decoder):
    """Calls the kernels itself."""

    def paged(self, tokens: jax.Array, kv_pages: Any, batch: Batch, **options: Any) -> tuple[jax.Array, Any]:
        return super().paged(tokens, kv_pages, dataclasses.replace(batch, heads=None), **options)


@pytest.mark.parametrize("size", [4, 8])
def test_a_model_that_knows_nothing_of_the_mesh(size: int) -> None:
    """Is refused, and told what to do."""
    llm = LLM(_Direct(MODELS["llama"], rngs=nnx.Rngs(0)), mesh=mesh_of(size), **OPTIONS)
    with pytest.raises(AttributeError, match=r"a KV pool on a mesh has no .*pagedjax\.attention\.paged"):
        llm.warmup()
