"""Compiled programs kept on disk, so that the next process with the same model and options need not compile them.

jax has such a cache, one for the whole process: the folder it is given first serves everything that is compiled from
then on, a trainer's programs too. `programs_kept` lends it to the engine for the time that it compiles and takes it
back, so that nothing else comes to lie in the engine's folder, and a folder that the process chooses later is the one
it gets. What cannot be told apart is what another thread compiles in that time: those programs are kept as well.

Who has chosen a folder (`jax_compilation_cache_dir`, JAX_COMPILATION_CACHE_DIR, even an empty one) has chosen for the
engine too, and JAX_ENABLE_COMPILATION_CACHE=0 is off. `LLM.load` uses the cache, `LLM` does not: who has the parameters
in hand is often training them.

jax finds a program by its code, the versions of jaxlib and XLA, XLA_FLAGS, the compile options and the device, of a CPU
the instructions it has: a program of another machine is compiled again, not run. The folder can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import threading
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from pagedjax.loaders.hub import cache_dir

logger = logging.getLogger(__name__)

FOLDER = "programs"  # in the cache folder of the models
FOLDER_OPTION, LEAST_SECONDS_OPTION = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
ENABLED_OPTION = "jax_enable_compilation_cache"
_lent = threading.RLock()  # two engines compile one after the other: each puts back what it has found


def folder() -> pathlib.Path:
    """Where programs are kept: beside the models that were fetched (PAGEDJAX_CACHE, or the user's cache folder)."""
    return cache_dir() / FOLDER


@contextlib.contextmanager
def programs_kept() -> Iterator[None]:
    """Within it, what is compiled is looked up in `folder` and kept there; afterwards jax is as it was before.

    Where that can't be, it changes nothing: the process has a cache of its own, or none by choice; it is one of
    several, of which each would find other programs; or the folder can't be written or is not this user's alone, since
    whoever can write there decides what code is run.
    """
    with _lent:
        if not _can_be_lent():
            yield
            return
        before = {name: getattr(jax.config, name) for name in (FOLDER_OPTION, LEAST_SECONDS_OPTION)}
        compilation_cache.reset_cache()  # jax goes on with the folder it has opened, whatever the option says
        jax.config.update(FOLDER_OPTION, str(folder()))
        jax.config.update(LEAST_SECONDS_OPTION, 0.0)  # a start has many small programs, and each counts
        try:
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


def _can_be_lent() -> bool:
    if not getattr(jax.config, ENABLED_OPTION) or getattr(jax.config, FOLDER_OPTION) is not None:
        return False
    return jax.process_count() == 1 and _is_private(folder())


def _is_private(path: pathlib.Path) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.stat()
    except OSError as error:
        logger.info("compiled programs are not kept: %s", error)
        return False
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        logger.info("compiled programs are not kept: others may write to %s", path)
        return False
    return os.access(path, os.W_OK | os.X_OK)
