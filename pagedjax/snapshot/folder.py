"""A folder of saved states: the last one that was finished counts, whenever the process that wrote them was killed.

Orbax's CheckpointManager writes each state beside the ones before it, under a temporary name until it is complete, and
removes the older ones only after that. So there is a whole state at every moment after the first one.

Where a program has several processes, all save and load together, and every one has all of the state: the first writes
it, and each reads it for itself, from a file system that they share. All of them raise where one has to.
"""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from pagedjax.snapshot.numbers import Numbers
from pagedjax.snapshot.snapshot import Snapshot

FORMAT = "pagedjax engine state"
FORMAT_VERSION = 1

PREFIX = "state"  # the states are state_0, state_1 ...; nothing else in the folder is touched
CONTENT, NUMBERS, BLOCKS = "content", "numbers", "blocks"

WRITER = 0  # the process that writes
NO_STATE = -1  # as the number of a state
NOT_MINE = np.iinfo(np.int32).max  # the same, from the processes that do not write

PATIENCE = 5.0  # seconds in which a file system shows one process what another has written


def save(folder: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Writes a state beside the one before it, which is then removed.

    Args:
        folder: made if there is none.
        snapshot: the state.

    Raises:
        OSError, ValueError: it cannot be written, or not every process can see it; where it was not written, the state
            before it, if any, is still there.
    """
    folder = pathlib.Path(folder).absolute()
    number, failure = NOT_MINE, None
    if jax.process_index() == WRITER:
        try:
            number = _write(folder, snapshot)
        except Exception as error:  # raised once the others know
            number, failure = NO_STATE, error
    number = _least(number)
    if failure is not None:
        raise failure
    if number == NO_STATE:
        raise OSError(f"process {WRITER} could not write a state to {folder}; it has raised why")
    if not _least(_appears(folder / f"{PREFIX}_{number}")):
        raise OSError(
            f"process {WRITER} has written {PREFIX}_{number} to {folder}, and not every process can see it there; give "
            "a folder on a file system that all processes share"
        )


def load(folder: str | os.PathLike[str]) -> Snapshot:
    """Reads the last finished state.

    Raises:
        FileNotFoundError: there is no such folder, or no finished state in it.
        OSError: that is so for some processes only, or they see different states.
        ValueError: the state is damaged, or of another version.
    """
    folder = pathlib.Path(folder).absolute()
    number = _last(folder) if folder.is_dir() else NO_STATE
    least, most = _least(number), -_least(-number)  # every process asks for both, whatever the first says
    if not least == number == most:
        raise OSError(
            f"processes do not find the same state in {folder}, one of them {number} (none is {NO_STATE}); give a "
            "folder on a file system that all processes share"
        )
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; give one that LLM.save_state has written to")
    if number == NO_STATE:
        raise FileNotFoundError(
            f"{folder} has no finished state: LLM.save_state has not written to it, or was interrupted at its first"
        )
    return _read(folder, number)


def _write(folder: pathlib.Path, snapshot: Snapshot) -> int:
    """The number of the state."""
    content = {"format": FORMAT, "version": FORMAT_VERSION, "num_arrays": len(snapshot.blocks), **snapshot.content}
    items: dict[str, Any] = {
        CONTENT: ocp.args.JsonSave(content),
        NUMBERS: ocp.args.PyTreeSave(snapshot.numbers.arrays),
    }
    if snapshot.blocks:
        items[BLOCKS] = ocp.args.PyTreeSave({str(place): array for place, array in enumerate(snapshot.blocks)})
    folder.mkdir(parents=True, exist_ok=True)
    with _manager(folder) as manager:
        last = manager.latest_step()
        number = 0 if last is None else last + 1
        manager.save(number, args=ocp.args.Composite(**items))
    return number


def _last(folder: pathlib.Path) -> int:
    with _manager(folder) as manager:
        step = manager.latest_step()
    return NO_STATE if step is None else step


def _read(folder: pathlib.Path, number: int) -> Snapshot:
    with _manager(folder) as manager:
        content = _restore(manager, number, CONTENT, ocp.args.JsonRestore())
        kind = (content.get("format"), content.get("version"))
        if kind != (FORMAT, FORMAT_VERSION):
            raise ValueError(
                f"{folder} has a state of format {kind[0]!r}, version {kind[1]!r}; this package reads {FORMAT!r}, "
                f"version {FORMAT_VERSION}"
            )
        arrays = _restore(manager, number, NUMBERS, _on_host("ints", "floats"))
        blocks: list[np.ndarray] = []
        names = [str(place) for place in range(content["num_arrays"])]
        if names:
            found = _restore(manager, number, BLOCKS, _on_host(*names))
            blocks = [found[name] for name in names]
    return Snapshot(content, Numbers(arrays["ints"], arrays["floats"]), blocks)


def _manager(folder: pathlib.Path) -> ocp.CheckpointManager:
    """That of this process alone: it waits for no other one."""
    here = jax.process_index()
    options = ocp.CheckpointManagerOptions(
        step_prefix=PREFIX,
        max_to_keep=1,
        create=False,
        enable_async_checkpointing=False,
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process_{here}"
        ),
    )
    return ocp.CheckpointManager(folder, options=options)


def _least(number: int) -> int:
    """Of a number that every process has."""
    return number if jax.process_count() == 1 else int(multihost_utils.process_allgather(np.int32(number)).min())


def _appears(state: pathlib.Path) -> bool:
    end = time.monotonic() + PATIENCE
    while not (there := state.is_dir()) and time.monotonic() < end:
        time.sleep(0.1)
    return there


def _on_host(*names: str) -> Any:
    return ocp.args.PyTreeRestore(restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names})


def _restore(manager: ocp.CheckpointManager, step: int, item: str, args: Any) -> Any:
    try:
        return manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{item} of state {step} in {manager.directory} can't be read: {error}") from error
