"""What one of several devices holds of a model that is divided over them; the rules are `pagedjax.tensor_parallel`'s.

KV heads are divided where they divide. Where there are more devices than KV heads, a multiple of them, each device has
the K/V of one, and several have the same. Where neither holds, or the query heads do not divide, every device has all
of the attention. A matrix whose divided size does not divide is whole on every device; norms, and the biases of what is
summed over devices, are in any case.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from pagedjax.capacity.kv_shape import DTYPE_BYTES, KVShape

if TYPE_CHECKING:
    from pagedjax.config import ModelConfig

# Which axis of a parameter is divided, counted from the last.
_ATTENTION = {"qkv.kernel": -1, "qkv.bias": -1, "out.kernel": -2}
_DIVIDED_AXIS = {
    **_ATTENTION,
    "gate_up.kernel": -1,
    "gate_up.bias": -1,
    "down.kernel": -2,
    "embed.embedding": -2,
    "lm_head.kernel": -1,
}


@dataclasses.dataclass(frozen=True)
class Share:
    """A device's part, and a sentence where it is not what one may expect."""

    shape: KVShape
    note: str | None = None


def share_of_config(config: ModelConfig, dtype: str, num_devices: int) -> Share:
    """One device's part of a known architecture, its weights to the byte."""
    num_kv_heads, note = _divide_heads(config.num_q_heads, config.num_kv_heads, num_devices)
    shape = KVShape(
        num_layers=config.num_layers,
        num_kv_heads=num_kv_heads or config.num_kv_heads,
        head_dim=config.head_dim,
        params_bytes=_num_params(config, num_devices, divides_attention=num_kv_heads is not None) * DTYPE_BYTES[dtype],
        num_q_heads=config.num_q_heads,
        dtype=dtype,
        window=config.largest_window,
        max_position_embeddings=config.max_position_embeddings,
    )
    return Share(shape, note)


def share_of_shape(shape: KVShape, num_devices: int) -> Share:
    """One device's part of a model of which only sizes are known: an equal part of the weights."""
    if num_devices == 1:
        return Share(shape)
    num_kv_heads, note = _divide_heads(shape.num_q_heads, shape.num_kv_heads, num_devices)
    params_bytes = -(-shape.params_bytes // num_devices)
    part = dataclasses.replace(shape, num_kv_heads=num_kv_heads or shape.num_kv_heads, params_bytes=params_bytes)
    weights = "weights are taken to divide evenly, which norms do not"
    return Share(part, weights if note is None else f"{note}; {weights}")


def _divide_heads(num_q_heads: int | None, num_kv_heads: int, num_devices: int) -> tuple[int | None, str | None]:
    """KV heads in one device's pool, or None: all of them, as it has the whole attention; and what to say of it."""
    if num_kv_heads % num_devices == 0:
        return num_kv_heads // num_devices, None
    if num_devices % num_kv_heads == 0 and (num_q_heads is None or num_q_heads % num_devices == 0):
        copies = num_devices // num_kv_heads
        return 1, f"{num_kv_heads} KV heads over {num_devices} devices: each head is held {copies} times"
    q_text = "" if num_q_heads is None else f"{num_q_heads} query and "
    return None, f"{q_text}{num_kv_heads} KV heads do not divide by {num_devices} devices: each has the whole attention"


def _num_params(config: ModelConfig, num_devices: int, *, divides_attention: bool) -> int:
    """Elements of all parameters on one device."""
    from pagedjax.loaders.param_shapes import flatten, param_shapes

    total = 0
    for path, shape in flatten(param_shapes(config)).items():
        name = ".".join(path.split(".")[-2:])
        axis = _DIVIDED_AXIS.get(name) if divides_attention or name not in _ATTENTION else None
        divides = axis is not None and shape[axis] % num_devices == 0
        total += math.prod(shape) // (num_devices if divides else 1)
    return total
