"""Amounts of memory as people write them, and as they read them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 2 ** (10 * power) for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}b": 10 ** (3 * power) for power, prefix in enumerate("kmgt", 1)},
}


def parse_bytes(value: int | str) -> int:
    """Bytes of a number, or of a text such as "80GiB", "80 GB" (10^9) or "512MiB".

    Raises:
        ValueError: neither of them, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is no amount of memory; write bytes, or a number with a unit: 80GiB, 80GB, 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def show_bytes(num_bytes: float) -> str:
    """A number with the largest binary unit in which it is at least 1."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:,.{0 if num_bytes % 2**power == 0 else 2}f} {unit}"
    return f"{num_bytes:,.0f} bytes"
