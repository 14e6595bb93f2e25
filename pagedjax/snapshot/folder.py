"""A folder of saved states: the last one that was finished counts, whenever the process that wrote them was killed.

Orbax's CheckpointManager writes each state beside the ones before it, under a temporary name until it is complete, and
removes the older ones only after that. So there is a whole state at every moment after the first one.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from pagedjax.snapshot.numbers import Numbers
from pagedjax.snapshot.snapshot import Snapshot

FORMAT = "pagedjax engine state"
FORMAT_VERSION = 1

PREFIX = "state"  # the states are state_0, state_1 ...; nothing else in the folder is touched
CONTENT, NUMBERS, BLOCKS = "content", "numbers", "blocks"


def save(folder: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Writes a state beside the one before it, which is then removed.

    Args:
        folder: made if there is none.
        snapshot: the state.

    Raises:
        OSError, ValueError: it cannot be written; the state before it, if any, is still there.
    """
    content = {"format": FORMAT, "version": FORMAT_VERSION, "num_arrays": len(snapshot.blocks), **snapshot.content}
    items: dict[str, Any] = {
        CONTENT: ocp.args.JsonSave(content),
        NUMBERS: ocp.args.PyTreeSave(snapshot.numbers.arrays),
    }
    if snapshot.blocks:
        items[BLOCKS] = ocp.args.PyTreeSave({str(place): array for place, array in enumerate(snapshot.blocks)})
    with _manager(folder, create=True) as manager:
        last = manager.latest_step()
        manager.save(0 if last is None else last + 1, args=ocp.args.Composite(**items))


def load(folder: str | os.PathLike[str]) -> Snapshot:
    """Reads the last finished state.

    Raises:
        FileNotFoundError: there is no such folder, or no finished state in it.
        ValueError: the state is damaged, or of another version.
    """
    folder = pathlib.Path(folder).absolute()
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; give one that LLM.save_state has written to")
    with _manager(folder, create=False) as manager:
        step = manager.latest_step()
        if step is None:
            raise FileNotFoundError(
                f"{folder} has no finished state: LLM.save_state has not written to it, or was interrupted at its first"
            )
        content = _restore(manager, step, CONTENT, ocp.args.JsonRestore())
        kind = (content.get("format"), content.get("version"))
        if kind != (FORMAT, FORMAT_VERSION):
            raise ValueError(
                f"{folder} has a state of format {kind[0]!r}, version {kind[1]!r}; this package reads {FORMAT!r}, "
                f"version {FORMAT_VERSION}"
            )
        arrays = _restore(manager, step, NUMBERS, _on_host("ints", "floats"))
        blocks: list[np.ndarray] = []
        names = [str(place) for place in range(content["num_arrays"])]
        if names:
            found = _restore(manager, step, BLOCKS, _on_host(*names))
            blocks = [found[name] for name in names]
    return Snapshot(content, Numbers(arrays["ints"], arrays["floats"]), blocks)


def _manager(folder: str | os.PathLike[str], *, create: bool) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        step_prefix=PREFIX, max_to_keep=1, create=create, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager(pathlib.Path(folder).absolute(), options=options)


def _on_host(*names: str) -> Any:
    return ocp.args.PyTreeRestore(restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names})


def _restore(manager: ocp.CheckpointManager, step: int, item: str, args: Any) -> Any:
    try:
        return manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{item} of state {step} in {manager.directory} can't be read: {error}") from error
