"""The Pallas kernels in their interpreters, for tests that ask the same of every implementation.

An interpreted kernel takes seconds to compile and less to run, so calls share programs: what can be traced is, and an
implementation's problems have one size. Races are looked for, and memory that was never written is NaN on the TPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import paged_attention

KERNELS = ("tpu", "gpu")
PARAMS = {
    "tpu": pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan"),
    "gpu": gpu_interpreter.PARAMS,
}
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

NO_WINDOW, NO_SINK = 2**30, -1e30  # so that calls with and without them share a program

_COMMON: dict[str, Any] = {"head_dim": 64, "max_blocks": 5, "num_blocks": 14, "num_rows": 4, "num_tokens": 18}
# The GPU's matrix unit has 16 bits, and its interpreter is slow by the KV head.
SIZES: dict[str, dict[str, Any]] = {
    "tpu": _COMMON | {"num_q_heads": 4, "num_kv_heads": 2, "dtype": "float32"},
    "gpu": _COMMON | {"num_q_heads": 4, "num_kv_heads": 1, "dtype": "bfloat16"},
}


def make(kernel: str, seed: int, seq_lens: list[int], query_lens: list[int], **changes: Any) -> oracle.Problem:
    return oracle.make(seed, seq_lens, query_lens, **SIZES[kernel] | changes)


def attend(arguments: tuple, kernel: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """out and LSE in float64 of `paged_attention` with these options; fails where there is a race."""
    static = {name: options.pop(name, default) for name, default in _STATIC.items()}
    traced = {"sinks": jnp.full(arguments[0].shape[1], NO_SINK), "scale": arguments[0].shape[2] ** -0.5}
    if static["causal"]:
        traced["sliding_window"] = NO_WINDOW
    traced |= {name: x for name, x in options.items() if x is not None}
    out, lse = _program(kernel, *static.values())(arguments, jax.tree.map(jnp.asarray, traced))
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    assert_no_race(kernel)
    return out, lse


def run(problem: oracle.Problem, kernel: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    return attend(problem.arguments(), kernel, **{"layer": problem.layer} | options)


def assert_no_race(kernel: str) -> None:
    if kernel == "gpu":
        gpu_interpreter.assert_no_race()
        return
    races = interpret_pallas_call.races
    pltpu.reset_tpu_interpret_mode_state()
    assert races is None or not races.races_found


_STATIC: dict[str, Any] = {"soft_cap": None, "causal": True, "max_query_len": None}


@functools.cache
def _program(kernel: Any, soft_cap: float | None, causal: bool, max_query_len: int | None) -> Callable[..., Any]:
    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def program(arguments: tuple, options: dict[str, jax.Array]) -> Any:
        static: dict[str, Any] = {"soft_cap": soft_cap, "causal": causal, "max_query_len": max_query_len}
        interpret = PARAMS[kernel]
        return paged_attention(
            *arguments, **static, **options, return_lse=True, implementation=kernel, interpret=interpret
        )

    return program
