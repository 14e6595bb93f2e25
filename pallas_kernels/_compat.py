"""Every difference between the supported versions of jax, 0.10.2 to 0.12."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def gpu_interpret_params(**options: Any) -> Any:
    """The GPU interpreter's InterpretParams; before jax 0.12 they are not public."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams(**options)
    from jax._src.pallas.mosaic_gpu.interpret import params

    return params.InterpretGPUParams(**options)


def gpu_load(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """Loads a whole ref of the Mosaic GPU backend into registers, in a layout; optimized=False permits slow ways."""
    indices = (...,) if "idx" in inspect.signature(plgpu.load).parameters else ()  # gone in jax 0.12
    return plgpu.load(ref, *indices, layout=layout, optimized=optimized)


def gpu_transpose_ref(ref: Any) -> Any:
    """The transpose of a two-dimensional ref of the Mosaic GPU backend."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def gpu_compiler_params(**options: Any) -> plgpu.CompilerParams:
    """Compiler parameters of a Mosaic GPU kernel with the semantics that were the default before jax 0.12: register
    layouts are written out, which every version accepts, rather than inferred."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **options)


def gpu_matmul(a: Any, b: Any, transposed: tuple[bool, bool], shape: Any, interpret: Any) -> jax.Array:
    """The float32 product of two matrices in shared memory, each as it lies there or transposed, by the matrix unit.

    The interpreter before jax 0.12 has no transposed operands; there it is a product of what is read.
    """
    if interpret and not hasattr(plgpu, "InterpretGPUParams"):
        left, right = (x[...].T if flip else x[...] for x, flip in zip((a, b), transposed, strict=True))
        return jnp.dot(left, right, preferred_element_type=jnp.float32)
    a, b = (gpu_transpose_ref(x) if flip else x for x, flip in zip((a, b), transposed, strict=True))

    def product(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def gpu_store(ref: Any, x: jax.Array) -> None:
    """Stores registers straight to global memory, in whatever pieces the layout has; since jax 0.12 pieces of less
    than a cache line have to be asked for."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x
