"""The GPU interpreter as the tests use it: with race detection, and one quick compilation a kernel.

Before jax 0.12 the interpreter compiles a kernel anew for every program and warpgroup, seconds each; here its runner is
replaced by one that compiles once, and spends little on optimizing. A race only sets a flag there: `assert_no_race`
looks at it.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from pallas_kernels import _compat

PARAMS = _compat.gpu_interpret_params(detect_races=True)
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

_compiled: dict[int, tuple[Any, Any]] = {}  # by the id of a jaxpr: the jaxpr, so that it lives on, and its program
_compiling = threading.Lock()


def assert_no_race() -> None:
    assert not interpret_pallas_call.get_races().races_found


def _run(jaxpr: Any, consts: Any, *arguments: Any) -> None:
    jax.core.eval_jaxpr(jaxpr, consts, *arguments)


def _run_jaxpr(jaxpr: Any, consts: Any, *arguments: Any) -> None:
    with _compiling:  # the threads of a program start together: one compiles, the others find it compiled
        if id(jaxpr) not in _compiled:
            lowered = jax.jit(_run, static_argnums=0).lower(jaxpr, consts, *arguments)
            _compiled[id(jaxpr)] = jaxpr, lowered.compile(compiler_options=QUICKLY)
    _compiled[id(jaxpr)][1](consts, *arguments)


thread_map._run_jaxpr = _run_jaxpr
