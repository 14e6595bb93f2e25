"""The rotary embedding of a Hugging Face `config.json`: four places it may be written in, one `RopeConfig`.

`rope_theta` alone; beside `rope_scaling`; inside a flat `rope_parameters`; or inside one `rope_parameters` per layer
type. Precedence and defaults are those of transformers (`modeling_rope_utils.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pagedjax.config import RopeConfig, RopeKind

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
_DEFAULT_THETA = 10000.0
_PARTIAL = "partial_rotary_factor"
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}

Json = Mapping[str, Any]


def rope_config(config: Json, max_position: int, windows: Sequence[int | None]) -> RopeConfig:
    """The one rotary embedding of all layers.

    Args:
        config: the parsed file, flat (no `text_config`).
        max_position: its `max_position_embeddings`, tokens.
        windows: the sliding window of each layer; they tell which of the nested parameters are used.

    Raises:
        ValueError: an unknown kind, a missing parameter, or layer types that differ.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    layer_types = [key for key, value in scaling.items() if isinstance(value, Mapping)]
    if not layer_types:
        return _parse(config, scaling, parameters.get("rope_theta"), max_position)
    ropes = {}
    for kind in sorted({SLIDING_ATTENTION if window else FULL_ATTENTION for window in windows}):
        if not isinstance(scaling.get(kind), Mapping):
            raise ValueError(f"the rope parameters are nested per layer type ({layer_types}), but not for {kind!r}")
        ropes[kind] = _parse(config, scaling[kind], None, max_position)
    first, *others = ropes.values()
    if any(other != first for other in others):
        raise ValueError(f"the rope parameters differ between layer types, which is not supported: {ropes}")
    return first


def _parse(config: Json, scaling: Json, other_theta: float | None, max_position: int) -> RopeConfig:
    kind: Any = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in get_args(RopeKind):
        raise ValueError(f"unknown rope kind {kind!r} in config.json; supported: {', '.join(get_args(RopeKind))}")
    partial = scaling.get(_PARTIAL) or config.get(_PARTIAL) or 1.0
    if partial != 1.0:
        raise ValueError(f"{_PARTIAL} is {partial}; only whole heads (1.0) can be rotated")
    if missing := [key for key in _REQUIRED[kind] if scaling.get(key) is None]:
        raise ValueError(f"rope kind {kind!r} needs {', '.join(missing)}; config.json has only {dict(scaling)}")
    theta = _number(scaling.get("rope_theta") or other_theta or config.get("rope_theta") or _DEFAULT_THETA, "theta")
    if kind == "default":
        if scaling.get("factor") not in (None, 1):
            raise ValueError(f"rope_scaling has factor={scaling['factor']} and no rope_type; name the kind")
        return RopeConfig(theta=theta)
    fields = [field.name for field in dataclasses.fields(RopeConfig) if field.type in ("float", "float | None")]
    values = {key: _number(scaling[key], key) for key in fields if scaling.get(key) is not None}
    values["theta"] = theta
    original = None if kind == "linear" else _original_max_position(config, scaling, kind, max_position)
    if kind == "yarn" and original:
        values.setdefault("factor", max_position / original)
    truncate = scaling.get("truncate", True)
    return RopeConfig(kind=kind, original_max_position=original, truncate=bool(truncate), **values)


def _original_max_position(config: Json, scaling: Json, kind: str, max_position: int) -> int:
    key = "original_max_position_embeddings"
    if kind == "dynamic":  # always stretched against max_position_embeddings
        return max_position
    return int(_number(config.get(key) or scaling.get(key) or max_position, key))  # the outer one goes first


def _number(value: Any, name: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name} of the rope parameters is {value!r} in config.json; it must be a number")
    return float(value)
