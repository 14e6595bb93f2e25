"""Converts a checkpoint to this package's Orbax format: `python -m pagedjax.convert SOURCE DEST`.

A quantised GGUF is dequantised once instead of at every start, and the result can be restored onto sharded devices,
each reading its part only. The tokenizer goes along.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from pagedjax.loaders import FetchError, load_checkpoint, resolve
from pagedjax.loaders.hub import ALIASES
from pagedjax.loaders.param_shapes import PARAM_DTYPES, flatten
from pagedjax.text import Tokenizer

END_TOKEN_FILES = ("config.json", "generation_config.json")  # where a folder without a tokenizer names them

Say = Callable[[str], None]


def convert(
    source: str | os.PathLike[str], dest: str | os.PathLike[str], *, dtype: Any = None, progress: bool = True
) -> None:
    """Writes a checkpoint of any kind as an Orbax checkpoint with its tokenizer.

    Args:
        source: what `load_checkpoint` takes: an alias, a Hugging Face folder, a .gguf file, an Orbax checkpoint.
        dest: the folder to write; it must not exist, or be empty.
        dtype: of every parameter; None keeps the stored one (float32 for a quantised GGUF).
        progress: whether to say what is done, with bars, on stderr.

    Raises:
        ValueError: the source can't be loaded, or `dest` has something in it.
        pagedjax.loaders.FetchError: an alias could not be fetched.
    """
    from pagedjax.loaders import orbax  # here: it takes a second, and --help does not need it

    started = time.perf_counter()

    def say(text: str) -> None:
        if progress:
            print(f"[{time.perf_counter() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    orbax.check_destination(dest)  # before minutes of loading
    path, kind = resolve(source, progress=progress)
    with tempfile.TemporaryDirectory() as scratch:
        _save_text(path, kind, scratch, say)
        say(f"loading {path}")
        checkpoint = load_checkpoint(path, dtype, progress=progress)
        leaves = flatten(checkpoint.params).values()
        size = sum(leaf.nbytes for leaf in leaves)
        say(f"writing {sum(leaf.size for leaf in leaves) / 1e6:.1f} M parameters, {size / 1e6:.0f} MB, to {dest}")
        orbax.save(dest, checkpoint.config, checkpoint.params, sorted(pathlib.Path(scratch).iterdir()))
    say(f"done: {dest}")


def _save_text(path: pathlib.Path, kind: str, folder: str, say: Say) -> None:
    """Puts the tokenizer's files into `folder`; a checkpoint that has none is converted without text."""
    from pagedjax.loaders.gguf_file import GGUFFile

    try:
        tokenizer = Tokenizer.from_gguf(GGUFFile(path).reader) if kind == "gguf" else Tokenizer.from_folder(path)
    except ValueError as error:
        say(f"no tokenizer, so the result takes token ids only: {error}")
        for name in END_TOKEN_FILES:
            if (path / name).is_file():
                shutil.copyfile(path / name, pathlib.Path(folder) / name)
        return
    tokenizer.save(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m pagedjax.convert", description=__doc__.split("\n")[0])
    known = ", ".join(sorted(ALIASES))
    parser.add_argument("source", help=f"a Hugging Face folder, a .gguf file, an Orbax checkpoint, or a name ({known})")
    parser.add_argument("dest", help="the folder to write; it must not exist, or be empty")
    parser.add_argument(
        "--dtype", choices=PARAM_DTYPES, help="of every parameter (default: as stored, float32 for a quantised GGUF)"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    options = parser.parse_args(arguments)
    try:
        convert(options.source, options.dest, dtype=options.dtype, progress=not options.quiet)
    except (ValueError, OSError, FetchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
