"""One model over the devices of a mesh: which device has what, of the parameters, the KV pool and the state.

Attention is divided by heads (`pagedjax.head_sharding`), the MLP by its inner size, the vocabulary by its ids; the
compiler divides the computation accordingly and sums where parts meet. What the host reads or writes, tables, rows and
results, is whole on every device, so that in a mesh of several processes each runs the same loop on the same values.

The axis of the mesh that is divided over is called "tensor", "model" or "tp", or it is the only one. Along every other
axis devices hold and compute the same: that is for a trainer's mesh, whose parameters are then used where they are.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pagedjax.batch import Batch
from pagedjax.config import ModelConfig
from pagedjax.head_sharding import WHOLE, DividedPages, HeadSharding
from pallas_kernels import KVPages

logger = logging.getLogger(__name__)

AXIS_NAMES = ("tensor", "model", "tp")

# Which axis of a parameter is divided, counted from the last, so that it does not matter whether layers are stacked.
# The others (norms, and the biases of what is summed over devices) are whole on every device.
_ATTENTION: dict[tuple[str, ...], int] = {("qkv", "kernel"): -1, ("qkv", "bias"): -1, ("out", "kernel"): -2}
_DIVIDED_AXIS: dict[tuple[str, ...], int] = {
    **_ATTENTION,
    ("gate_up", "kernel"): -1,
    ("gate_up", "bias"): -1,
    ("down", "kernel"): -2,
    ("embed", "embedding"): -2,
    ("lm_head", "kernel"): -1,
}


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """How a model lies on a mesh; make one with `tensor_parallel`.

    Attributes:
        mesh: the devices, the compiler free to divide along every axis.
        axis: the one that is divided over.
        heads: of the attention.
    """

    mesh: Mesh
    axis: str
    heads: HeadSharding

    @property
    def num_parts(self) -> int:
        """Devices that the model is divided over."""
        return self.mesh.shape[self.axis]

    @property
    def whole(self) -> NamedSharding:
        """Every device has all of it."""
        return NamedSharding(self.mesh, WHOLE)

    def shardings(self, tree: Any) -> Any:
        """The same tree with a sharding in the place of each leaf: pools divided by heads, parameters as they belong,
        and all else whole."""

        def of(path: Any, leaf: Any) -> Any:
            is_pool = isinstance(leaf, KVPages)
            return self.heads.shardings(leaf) if is_pool else self.param_sharding(_names(path), leaf)

        return jax.tree_util.tree_map_with_path(of, tree, is_leaf=lambda leaf: isinstance(leaf, KVPages))

    def lower(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], donated: tuple[int, ...], num_results: int
    ) -> jax.stages.Lowered:
        """`function` as a program on the mesh.

        Args:
            function: what it returns is a tuple: the donated arguments, updated, and `num_results` trees beside.
            arguments: arrays, or shapes.
            donated: indices of the arguments that come back, and so are sharded as they came in.
            num_results: every process can read these.
        """
        inputs = self.shardings(arguments)
        outputs = (*(inputs[index] for index in donated), *[self.whole] * num_results)
        jitted = jax.jit(function, donate_argnums=donated, in_shardings=inputs, out_shardings=outputs)
        # Shapes alone, and this mesh: what the caller's own says of its axes is no concern of the program's.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        with jax.set_mesh(self.mesh):
            return jitted.lower(*shapes)

    def make(self, function: Callable[[], Any]) -> Any:
        """What `function` makes out of nothing, made where it belongs: no device has the whole of it."""
        with jax.set_mesh(self.mesh):
            return jax.jit(function, out_shardings=self.shardings(jax.eval_shape(function)))()

    def apply(self, function: Callable[..., Any], params: Any, *arguments: Any) -> Any:
        """`function` of parameters, such as a trainer's forward, on the mesh; its axes are left to the compiler there,
        whatever the trainer's own mesh says of them. What lies as an engine wants it is not copied."""
        with jax.set_mesh(self.mesh):
            return function(jax.tree.map(jax.device_put, params, self.shardings(params)), *arguments)

    def param_sharding(self, path: tuple[str, ...], leaf: Any) -> NamedSharding:
        """Where a parameter belongs.

        Args:
            path: its name, from the outside in.
            leaf: an array, or its shape. What is none of the decoder's stays as it lies, if that is on this mesh.
        """
        name = path[-2:]
        if name not in _DIVIDED_AXIS:
            return self._kept(leaf)
        axis = len(leaf.shape) + _DIVIDED_AXIS[name]
        if (name in _ATTENTION and self.heads.axis is None) or leaf.shape[axis] % self.num_parts:
            return self.whole
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, self.axis))

    def on_device(self, config: ModelConfig) -> ModelConfig:
        """The model as its pool on one device knows it."""
        return dataclasses.replace(config, num_kv_heads=self.heads.num_device_kv_heads)

    def on_mesh(self, model: Any) -> Any:
        """The model as `pagedjax.step.step` calls it, its attention divided and its logits whole on every device."""
        return _OnMesh(model, self)

    def agree(self, number: int) -> int:
        """The least that any process has of a number they all must share; call it on each of them."""
        if len({device.process_index for device in self.mesh.devices.flat}) == 1:
            return number
        return int(multihost_utils.process_allgather(np.int64(number)).min())

    def _kept(self, leaf: Any) -> NamedSharding:
        sharding = getattr(leaf, "sharding", None)
        if not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)):
            return self.whole
        here = [*sharding.mesh.devices.flat] == [*self.mesh.devices.flat]
        return NamedSharding(_without_types(sharding.mesh), sharding.spec) if here else self.whole


class _OnMesh:
    """A decoder that tells its attention about the mesh."""

    def __init__(self, model: Any, parallel: TensorParallel) -> None:
        self.config = model.config
        self._model, self._parallel = model, parallel

    def paged(
        self, tokens: jax.Array, kv_pages: KVPages, batch: Batch, *, implementation: str | None
    ) -> tuple[jax.Array, KVPages]:
        batch = dataclasses.replace(batch, heads=self._parallel.heads)
        hidden, divided = self._model.paged(tokens, DividedPages(kv_pages), batch, implementation=implementation)
        return hidden, divided.pages

    def logits(self, hidden: jax.Array) -> jax.Array:
        parallel, logits = self._parallel, self._model.logits(hidden)
        if logits.shape[-1] % parallel.num_parts == 0:
            # First each device's own ids: else the compiler may gather the head's weights instead of its results.
            parts = PartitionSpec(*[None] * (logits.ndim - 1), parallel.axis)
            logits = jax.lax.with_sharding_constraint(logits, NamedSharding(parallel.mesh, parts))
        return jax.lax.with_sharding_constraint(logits, parallel.whole)


@functools.cache
def tensor_parallel(mesh: Mesh | None, config: ModelConfig) -> TensorParallel | None:
    """How a model lies on a mesh; None for None.

    KV heads are divided where they divide. Where there are more devices than KV heads, a multiple of them, each device
    has one, and several have the same. Where neither holds, or the query heads do not divide, every device has all of
    the attention, which is logged once.

    Raises:
        ValueError: it is not clear which axis of the mesh is meant.
    """
    if mesh is None:
        return None
    axis = tensor_axis(mesh)
    num_parts = mesh.shape[axis]
    mesh = _without_types(mesh)
    q_heads, kv_heads = config.num_q_heads, config.num_kv_heads
    if kv_heads % num_parts == 0:
        heads = HeadSharding(mesh, axis, kv_heads)
    elif num_parts % kv_heads == 0 and q_heads % num_parts == 0:
        heads = HeadSharding(mesh, axis, kv_heads, kv_copies=num_parts // kv_heads)
    else:
        logger.warning(
            "%d query and %d KV heads do not divide by %d devices: each has the whole attention and the whole KV pool; "
            "MLP and vocabulary are divided",
            *(q_heads, kv_heads, num_parts),
        )
        heads = HeadSharding(mesh, None, kv_heads)
    return TensorParallel(mesh, axis, heads)


def tensor_axis(mesh: Mesh) -> str:
    """The axis of a mesh that a model is divided over.

    Raises:
        ValueError: there are several, and none has one of `AXIS_NAMES`.
    """
    for name in (*AXIS_NAMES, *(mesh.axis_names if len(mesh.axis_names) == 1 else ())):
        if name in mesh.axis_names:
            return name
    raise ValueError(
        f"mesh has the axes {mesh.axis_names}; call the one to divide the model over one of {AXIS_NAMES}, or make a "
        "mesh of one axis"
    )


def param_shardings(params: Any, config: ModelConfig, mesh: Mesh) -> Any:
    """Where an engine on a mesh wants each parameter: a trainer that places its parameters so hands them over as they
    are.

    Args:
        params: an nnx.State or nested dicts, of arrays or of shapes.
        config: of the model.
        mesh: as in `EngineConfig.mesh`.

    Returns:
        The same tree with a NamedSharding in the place of each array: for `jax.device_put`, or `out_shardings`. Its
        mesh leaves all axes to the compiler, which is what `Decoder`'s forward for training needs.
    """
    parallel = tensor_parallel(mesh, config)
    assert parallel is not None
    return parallel.shardings(params)


def _without_types(mesh: Mesh) -> Mesh:
    """The mesh with every axis left to the compiler."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _names(path: Any) -> tuple[str, ...]:
    """The names in a key path: those of dicts and states, without what a flax variable adds."""
    return tuple(str(key.key) for key in path if hasattr(key, "key"))
