"""What the devices of a program send one another, read from its text."""

from __future__ import annotations

import dataclasses
import math
import re

import jax

_NAMES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
_INSTRUCTION = re.compile(rf"= (?P<result>[^=]*?) (?P<name>{_NAMES})(-start)?\(")
_SHAPE = re.compile(r"(\w+\[([\d,]*)\])")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction.

    Attributes:
        name: "all-reduce" and so on.
        shape: of the largest array that it gives each device, "bf16[64,4096]".
        num_elements: in that.
    """

    name: str
    shape: str
    num_elements: int


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """Those in a program, in the order of its text; one in a loop counts once."""
    found = []
    for line in compiled.as_text().splitlines():
        match = _INSTRUCTION.search(line)
        if match:
            shapes = [(_size(sizes), text) for text, sizes in _SHAPE.findall(match["result"])]
            num_elements, shape = max(shapes)
            found.append(Collective(match["name"], shape, num_elements))
    return found


def _size(sizes: str) -> int:
    return math.prod(int(size) for size in sizes.split(",") if size)
