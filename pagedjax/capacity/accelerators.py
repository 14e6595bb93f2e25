"""How much memory a chip has, by name.

GPUs: what `nvidia-smi` reports as total, which is neither the number on the box nor a round one (a card sold with 80 GB
has 80 GiB less what is kept back: an H100 SXM reports 81,559 MiB). TPUs: the HBM capacity of one jax device that Google
publishes. Not all of either can be had: the runtime keeps some, and jax by default takes 75% of a GPU.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Literal

Platform = Literal["tpu", "gpu", "cpu"]

GIB, MIB = 2**30, 2**20

_GOOGLE = "https://docs.cloud.google.com/tpu/docs/"
_SMI = "nvidia-smi, memory.total"


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A chip.

    Attributes:
        name: as people say it.
        memory_bytes: of one jax device.
        platform: "tpu" or "gpu".
        source: where the figure is from.
    """

    name: str
    memory_bytes: int
    platform: Platform
    source: str


ACCELERATORS = (
    Accelerator("TPU v4", 32 * GIB, "tpu", _GOOGLE + "v4"),
    Accelerator("TPU v5e", 16 * GIB, "tpu", _GOOGLE + "v5e"),
    Accelerator("TPU v5p", 95 * GIB, "tpu", _GOOGLE + "v5p"),
    Accelerator("TPU v6e", 32 * GIB, "tpu", _GOOGLE + "v6e"),
    Accelerator("TPU v7x", 96 * GIB, "tpu", _GOOGLE + "tpu7x (192 GiB a chip, which is two devices)"),
    Accelerator("A100-40GB", 40960 * MIB, "gpu", _SMI),
    Accelerator("A100-80GB", 81920 * MIB, "gpu", _SMI),
    Accelerator("H100", 81559 * MIB, "gpu", _SMI),
    Accelerator("H200", 143771 * MIB, "gpu", _SMI),
    Accelerator("B200", 183359 * MIB, "gpu", _SMI),
    Accelerator("L4", 23034 * MIB, "gpu", _SMI),
    Accelerator("L40S", 46068 * MIB, "gpu", _SMI),
    Accelerator("A10", 23028 * MIB, "gpu", _SMI),
)
# Other ways to say them, as `_key` makes them.
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "trillium": "v6e", "v6lite": "v6e", "ironwood": "v7x", "7x": "v7x"}
_AMBIGUOUS = {"a100": "A100-40GB or A100-80GB"}


def find_accelerator(name: str) -> Accelerator:
    """The chip of that name; case, spaces, dashes and makers' names do not matter.

    Raises:
        ValueError: no such chip is known, or there are several.
    """
    key = _key(name)
    if key in _AMBIGUOUS:
        raise ValueError(f"{name!r} comes in several sizes; write {_AMBIGUOUS[key]}")
    known = {_key(accelerator.name): accelerator for accelerator in ACCELERATORS}
    found = known.get(_ALIASES.get(key, key))
    if found is None:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {known[close[0]].name}? " if close else ""
        names = ", ".join(accelerator.name for accelerator in ACCELERATORS)
        raise ValueError(
            f"no accelerator {name!r} is known; {hint}the known ones are {names}; or give an amount such as 80GiB"
        )
    return found


def _key(name: str) -> str:
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(google|nvidia|cloud)+|(sxm\d?|hbm\d?e?)+$", "", key).removeprefix("tpu")
