"""Attention divided by heads over the devices of a mesh: each writes and reads the KV pool of its own heads.

Heads do not know of one another, so the devices do not communicate within attention. The function that attends runs
under `jax.shard_map`, which is what Pallas kernels need where there is more than one device: the compiler can't divide
them by itself.

Dimensions: T tokens, H query heads or KV heads, D head size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from pallas_kernels import KVPages

WHOLE = PartitionSpec()  # every device has all of it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DividedPages:
    """The pool of a mesh as a model gets it: for `HeadSharding.attend` and nothing else.

    Called on the whole pool, the functions of `pallas_kernels` would have more KV heads than the model where devices
    hold the same one, and a kernel can't be divided. So a model that calls them itself is told at its first step.
    """

    pages: KVPages

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a KV pool on a mesh has no {name!r}, since each device has that of its own heads; a model attends there "
            "through pagedjax.attention.paged, or the engine does without mesh= (docs/tensor_parallel.md)"
        )


@dataclasses.dataclass(frozen=True)
class HeadSharding:
    """Which device has which heads.

    Attributes:
        mesh: the devices.
        axis: of the mesh, that heads are divided over, or None: every device has all heads, and does the same.
        num_kv_heads: of the model.
        kv_copies: devices that hold the same KV head, where there are more devices than KV heads.
    """

    mesh: Mesh
    axis: str | None
    num_kv_heads: int
    kv_copies: int = 1

    @property
    def num_parts(self) -> int:
        return 1 if self.axis is None else self.mesh.shape[self.axis]

    @property
    def num_device_kv_heads(self) -> int:
        """KV heads in one device's pool."""
        return self.num_kv_heads * self.kv_copies // self.num_parts

    def zeros(self, num_layers: int, num_blocks: int, block_size: int, head_dim: int, dtype: Any) -> KVPages:
        """An empty pool, whose part on each device is a pool of that device's heads, with that device's padding."""
        sizes = (num_layers, num_blocks, block_size, self.num_device_kv_heads, head_dim, dtype)
        specs = jax.eval_shape(lambda: KVPages.zeros(*sizes)).partition_specs(self.axis)
        return self.map(lambda: KVPages.zeros(*sizes), (), specs)()

    def shardings(self, kv_pages: KVPages) -> KVPages:
        """The pool's shardings, in the place of its arrays."""
        return jax.tree.map(functools.partial(NamedSharding, self.mesh), kv_pages.partition_specs(self.axis))

    def attend(
        self, function: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, pool: DividedPages, *shared: Any
    ) -> tuple[jax.Array, DividedPages]:
        """`function(q, k, v, kv_pages, *shared)` on every device for its heads.

        Args:
            function: gives the heads' output and their pool; it may hold no arrays but its arguments.
            q, k, v: [T, H, D], all heads.
            pool: of all heads.
            shared: pytrees that every device gets whole.
        """
        if self.kv_copies > 1:
            k, v = (jnp.repeat(x, self.kv_copies, axis=-2) for x in (k, v))
        heads, pages = PartitionSpec(None, self.axis), pool.pages.partition_specs(self.axis)
        inputs = (heads, heads, heads, pages, *[WHOLE] * len(shared))
        out, kv_pages = self.map(function, inputs, (heads, pages))(q, k, v, pool.pages, *shared)
        return out, DividedPages(kv_pages)

    def gather(self, kv_pages: KVPages, layer: int, block_ids: np.ndarray, length: int) -> tuple[jax.Array, jax.Array]:
        """As `pallas_kernels.gather_kv`; every device has the result whole, each head once."""
        with jax.set_mesh(self.mesh):
            return _gather(self, kv_pages, np.int32(layer), block_ids, np.int32(length))

    def map(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """`function` on every device, for its parts of the arguments: `jax.shard_map` on this mesh."""
        # The check of which results are equal on all devices knows no Pallas calls.
        return jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


@functools.partial(jax.jit, static_argnums=0)
def _gather(heads: HeadSharding, kv_pages: KVPages, *arguments: Any) -> tuple[jax.Array, jax.Array]:
    each = PartitionSpec(None, heads.axis)
    inputs = (kv_pages.partition_specs(heads.axis), *[WHOLE] * len(arguments))
    k, v = heads.map(pallas_kernels.gather_kv, inputs, (each, each))(kv_pages, *arguments)
    once = (k[:, :: heads.kv_copies], v[:, :: heads.kv_copies])
    return jax.lax.with_sharding_constraint(once, NamedSharding(heads.mesh, WHOLE))
