"""Attention at the sizes of published models, as shapes alone: what the kernels are compiled for."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax import Decoder, ModelConfig
from pagedjax.config import RopeConfig
from pagedjax.engine_config import EngineConfig
from pagedjax.runner import lower_step
from pagedjax.step import EngineState, step
from pagedjax.tensor_parallel import param_shardings, tensor_parallel
from pallas_kernels import KVPages, device_free, paged_attention, write_kv

NUM_LAYERS = 4
NUM_BLOCKS = 4096


@dataclasses.dataclass(frozen=True)
class Heads:
    """The attention of one model."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    soft_cap: float | None = None
    sinks: bool = False
    window: bool = False


MODELS = {
    "llama-3-8b": Heads(32, 8, 128),
    "llama-3-70b": Heads(64, 8, 128),
    "qwen2.5-7b": Heads(28, 4, 128),
    "qwen3-0.6b": Heads(16, 8, 128),
    "gemma-2-9b": Heads(16, 8, 256, soft_cap=50.0, window=True),
    "gemma-3-1b": Heads(4, 1, 256, window=True),
    "gpt-oss-20b": Heads(64, 8, 64, sinks=True, window=True),
    "smollm2-135m": Heads(9, 3, 64),
    "phi-3-mini": Heads(32, 32, 96, window=True),
    "phi-2": Heads(32, 32, 80),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """A batch of one step."""

    num_rows: int
    num_tokens: int
    blocks_per_row: int
    max_query_len: int | None = None


WORK = {
    "decode": Work(64, 64, 512, max_query_len=1),
    "decode-256x2048": Work(256, 256, 2048, max_query_len=1),
    "verify": Work(16, 64, 512, max_query_len=4),
    "mixed": Work(64, 512, 512),
    "prefill-8192": Work(8, 8192, 512),
    "mixed-256x2048": Work(256, 512, 2048),
}

WITH_PREFILL = ("mixed", "prefill-8192", "mixed-256x2048")


def attention(
    heads: Heads, work: Work, *, dtype: Any, kv_dtype: Any = None, block_size: int = 16
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A write and the attention after it, as a layer does them: the function, and the shapes of its arguments; donate
    the pool, the first. The pool is that of the device that is traced for."""
    pool = jax.eval_shape(
        lambda: KVPages.zeros(NUM_LAYERS, NUM_BLOCKS, block_size, heads.num_kv_heads, heads.head_dim, kv_dtype or dtype)
    )

    def i32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    kv = jax.ShapeDtypeStruct((work.num_tokens, heads.num_kv_heads, heads.head_dim), dtype)
    q = jax.ShapeDtypeStruct((work.num_tokens, heads.num_q_heads, heads.head_dim), dtype)
    tables = (i32(work.num_rows, work.blocks_per_row), i32(work.num_rows), i32(work.num_rows + 1))
    sinks = jax.ShapeDtypeStruct((heads.num_q_heads,), jnp.float32)

    def run(
        pool: KVPages, q: Any, k: Any, v: Any, slots: Any, tables: Any, layer: Any, window: Any, scale: Any, sinks: Any
    ) -> Any:
        pool = write_kv(pool, layer, k, v, slots)
        out = paged_attention(
            q,
            pool,
            *tables,
            layer=layer,
            scale=scale,
            sliding_window=window if heads.window else None,
            soft_cap=heads.soft_cap,
            sinks=sinks if heads.sinks else None,
            max_query_len=work.max_query_len,
            return_lse=True,
        )
        return pool, out

    scale = jax.ShapeDtypeStruct((), jnp.float32)
    return run, (pool, q, kv, kv, i32(work.num_tokens), tables, i32(), i32(), scale, sinks)


def assert_holds(compiled: jax.stages.Compiled, kernels: list[str]) -> None:
    text = compiled.as_text()
    missing = [kernel for kernel in kernels if kernel not in text]
    assert not missing, f"{missing} not in the program: the XLA implementation was taken"


def assert_pool_in_place(compiled: jax.stages.Compiled, pool: KVPages) -> None:
    """The pool is aliased whole, and what the program needs beside its arguments holds no second one."""
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 4


def assert_nothing_copied(compiled: jax.stages.Compiled, pool: KVPages) -> None:
    """No array of the pool is copied into another order. The memory says so only of a copy too large for VMEM."""
    for x in jax.tree.leaves(pool):
        shape = ",".join(str(size) for size in x.shape)
        assert not re.search(rf"\[{shape}\]\S* copy\(", compiled.as_text()), f"[{shape}] is copied"


LLAMA_3_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rope=RopeConfig(theta=500000.0),
)


def check_engine_step(chip: device_free.Target, kernels: list[str], num_layers: int = 32) -> None:
    """The engine's whole step of Llama 3 8B compiles for a chip, its kernels in it and one pool in its memory."""
    config = dataclasses.replace(LLAMA_3_8B, num_layers=num_layers)
    graphdef, params = nnx.split(Decoder.abstract(config, jnp.bfloat16))
    options: dict[str, Any] = {"block_size": 16, "kv_dtype": jnp.bfloat16, "max_num_seqs": 64, "max_model_len": 8192}
    with device_free.tracing_for(chip.abstract):
        state = jax.eval_shape(lambda: EngineState.zeros(config, num_blocks=2048, **options))

    def run(params: Any, state: EngineState, num_new_tokens: jax.Array, num_steps: jax.Array) -> Any:
        model = nnx.merge(graphdef, params)
        sizes: dict[str, Any] = {"num_tokens": 64, "max_steps": 8, "num_vocab_tokens": config.vocab_size}
        return step(model, state, num_new_tokens, num_steps, **sizes, implementation=None)

    counts, num_steps = jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    compiled = device_free.compile_for(chip, run, params, state, counts, num_steps, donate_argnums=1)
    assert_holds(compiled, kernels)
    assert_pool_in_place(compiled, state.kv_pages)


def engine_step_on_mesh(chip: device_free.Target, num_tokens: int) -> tuple[jax.stages.Compiled, KVPages]:
    """The engine's whole step of Llama 3 8B, divided over the chips of a topology; and the pool of all of them."""
    mesh = chip.mesh("tensor")
    parallel = tensor_parallel(mesh, LLAMA_3_8B)
    assert parallel is not None
    graphdef, params = nnx.split(Decoder.abstract(LLAMA_3_8B, jnp.bfloat16))
    params = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        params,
        param_shardings(params, LLAMA_3_8B, mesh),
    )
    options: dict[str, Any] = {"block_size": 16, "max_num_seqs": 64, "max_model_len": 8192}
    config = EngineConfig(mesh=mesh, max_num_batched_tokens=num_tokens, **options)
    make = functools.partial(EngineState.zeros, LLAMA_3_8B, num_blocks=2048, kv_dtype=jnp.bfloat16, **options)
    state = jax.eval_shape(functools.partial(make, heads=parallel.heads))
    sizes = {"num_vocab_tokens": LLAMA_3_8B.vocab_size, "num_tokens": num_tokens, "max_proposals": 0}
    lowered = lower_step(graphdef, params, state, config, LLAMA_3_8B, **sizes)
    return device_free.compile_lowered(lowered), state.kv_pages
