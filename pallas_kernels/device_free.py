"""Compiles a function for a TPU or GPU that is not there: the chip's own compiler runs, nothing executes.

What it proves: the kernels lower and fit (registers, SMEM, VMEM, shared memory), and what XLA's memory analysis says.
What it does not: that they are right or fast on silicon. It needs the chip's compiler, so use an environment of its own
(with libtpu or the CUDA plugin installed, a plain `import jax` tries to start the chip): set JAX_PLATFORMS=cpu, and
TPU_SKIP_MDS_QUERY=1 for libtpu.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, SingleDeviceSharding

TPU_TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

# A GpuTargetConfigProto in text form: NVIDIA's published figures of one H200 SXM.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip to compile for."""

    platform: str  # "tpu" or "cuda"
    devices: tuple[Any, ...]  # of the topology
    abstract: AbstractDevice  # what a trace sees of one

    def mesh(self, axis: str) -> Mesh:
        """All chips of the topology along one axis: what takes a mesh is then traced and lowered for them."""
        return Mesh(np.array(self.devices), (axis,))


def target(name: str) -> Target:
    """The chip called `name`.

    Args:
        name: "v5e", "v5p", "v6e", "tpu7x" or "h200".

    Returns:
        The target; it needs libtpu, or the CUDA plugin and ptxas on PATH.

    Raises:
        ValueError: an unknown name.
    """
    if name in TPU_TOPOLOGIES:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TPU_TOPOLOGIES[name])
        device: Any = topology.devices[0]
        abstract = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
        return Target("tpu", tuple(topology.devices), abstract)
    if name == "h200":
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="H200", topology="1x1x1", target_config=H200
        )
        abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
        return Target("cuda", tuple(topology.devices), abstract)
    raise ValueError(f"no target is called {name!r}; use one of {(*TPU_TOPOLOGIES, 'h200')}")


def tracing_for(device: AbstractDevice) -> contextlib.AbstractContextManager[Any]:
    """While it is entered, traces are for a device that is not there: `jax.eval_shape` of `KVPages.zeros`, for example,
    gives the pool as it is on that device."""
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@contextlib.contextmanager
def _not_persisted() -> Iterator[None]:
    """Keeps programs out of jax's persistent cache: without the chip they could not be read back from it."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def compile_for(chip: Target, function: Callable[..., Any], *arguments: Any, **jit_options: Any) -> jax.stages.Compiled:
    """Compiles `function` for a chip.

    Args:
        chip: from `target`.
        function: what to jit.
        arguments: a pytree each, of arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes matter.
        jit_options: of `jax.jit`, donate_argnums for example.

    Returns:
        The compiled program: `.memory_analysis()`, `.as_text()`.
    """
    sharding = SingleDeviceSharding(chip.devices[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with tracing_for(chip.abstract), _not_persisted():
        traced = jax.jit(function, **jit_options).trace(*shapes)
        return traced.lower(lowering_platforms=(chip.platform,)).compile()


def compile_lowered(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles what was lowered for a mesh of chips that are not there (`Target.mesh`), with `in_shardings` on it."""
    with _not_persisted():
        return lowered.compile()
