"""States that cannot be loaded or saved, and processes that are killed while they do."""

from __future__ import annotations

import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import mock_engine
import pytest
from killed_engine import TOKENIZER, add_requests, rest, start, step
from mock_engine import GREEDY, SEEDED, Pieces, finish, use_tokenizer

from pagedjax import LLM, BeamSearchParams
from pagedjax.snapshot import raw_blocks

TESTS = pathlib.Path(__file__).parent


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    for llm in mock_engine.idle():
        use_tokenizer(monkeypatch, llm, TOKENIZER)
        yield llm


# What cannot go on


@pytest.mark.parametrize(
    ("add", "options", "message"),
    [
        (lambda llm: llm.add_request("big", [1] * 20, SEEDED), {"max_model_len": 24}, "'big'.*max_model_len"),
        (lambda llm: llm.add_request("big", [1] * 20, SEEDED), {"num_blocks": 12}, "'big'.*num_blocks"),
        (
            lambda llm: llm._engine.add(
                llm._maker.searched("wide", None, [1], BeamSearchParams(width=5, max_tokens=4))
            ),
            {"max_num_seqs": 4},
            "'wide'.*max_num_seqs",
        ),
    ],
)
def test_what_no_longer_fits(
    llm: LLM, tmp_path: pathlib.Path, add: Callable[[LLM], None], options: dict[str, int], message: str
) -> None:
    """Is named, and nothing is half restored. Not compiled: the engines of other sizes take no step."""
    llm.add_request("small", [2], GREEDY)
    add(llm)
    llm.step()
    llm.save_state(tmp_path)
    finish(llm)
    other = LLM(mock_engine.MockDecoder(), tokenizer=TOKENIZER, **mock_engine.OPTIONS | options)
    other._maker.num_made = 5
    with pytest.raises(ValueError, match=message):
        other.load_state(tmp_path)
    assert (other._maker.num_made, other.has_unfinished_requests(), other.weights_version) == (5, False, 0)
    other.audit()


def test_another_tokenizer_is_refused(llm: LLM, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [1], GREEDY)
    llm.step()
    llm.save_state(tmp_path)
    finish(llm)
    use_tokenizer(monkeypatch, llm, Pieces())
    with pytest.raises(ValueError, match=r"request 'a'.*tokenizer that the state was saved with"):
        llm.load_state(tmp_path)
    assert not llm.has_unfinished_requests()


def test_only_an_idle_engine_loads(llm: LLM, tmp_path: pathlib.Path) -> None:
    llm.add_request("a", [1], GREEDY)
    llm.save_state(tmp_path)
    with pytest.raises(ValueError, match="1 requests are unfinished"):
        llm.load_state(tmp_path)
    llm.abort("a")
    with pytest.raises(ValueError, match="wait to be handed out"):
        llm.load_state(tmp_path)


def test_a_device_that_fails_while_it_loads(llm: LLM, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mock_engine.pace(llm, decode_steps=1)
    llm.add_request("a", [1, 2, 3], GREEDY)
    step(llm, 3)
    llm.save_state(tmp_path, include_kv=True)
    expected = rest(llm)
    scatter = raw_blocks._scatter

    def broken(*arguments: Any) -> None:
        scatter(*arguments)  # consumes the donated pool
        raise RuntimeError("device on fire")

    with monkeypatch.context() as patch:
        patch.setattr(raw_blocks, "_scatter", broken)
        with pytest.raises(RuntimeError, match="device on fire"):
            llm.load_state(tmp_path)
    assert not llm.has_unfinished_requests()
    llm.audit()
    assert llm.load_state(tmp_path) == ["a"]
    assert rest(llm) == expected


# Folders


def test_folders_without_a_finished_state(llm: LLM, tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        llm.load_state(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no finished state"):
        llm.load_state(tmp_path)
    llm.save_state(tmp_path)
    (state,) = tmp_path.iterdir()
    state.rename(tmp_path / (state.name + ".orbax-checkpoint-tmp"))  # as Orbax calls it before it is complete
    with pytest.raises(FileNotFoundError, match="no finished state"):
        llm.load_state(tmp_path)
    llm.save_state(tmp_path)
    (state,) = tmp_path.iterdir()
    for file in (state / "numbers").rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(ValueError, match="can't be read"):
        llm.load_state(tmp_path)


# A write of Orbax's that fails late finds its event loop closed, which Python reports as an exception ignored.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kv", [False, True])
def test_a_save_that_fails(llm: LLM, tmp_path: pathlib.Path, kv: bool) -> None:
    """For lack of room, which a limit on the size of files stands for; the engine and the last state are as before."""
    start(llm, add_requests)
    step(llm, 5)
    llm.save_state(tmp_path / "states")
    expected = step(llm, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
    try:
        with pytest.raises((OSError, ValueError)):
            llm.save_state(tmp_path / "states", include_kv=kv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        llm.save_state(tmp_path / "file" / "states", include_kv=kv)
    expected |= rest(llm)
    llm.load_state(tmp_path / "states")
    assert rest(llm) == expected


# kill -9


def run_and_kill(arguments: list[str], num_lines: int, delay: float) -> bool:
    """Kills the process some time after so many lines; whether it had come to its end before."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    command = [sys.executable, "-W", "error", str(TESTS / "killed_engine.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for _ in range(num_lines):
            if not (line := child.stdout.readline()):
                raise AssertionError(child.stderr.read())
            if line == "done\n":
                return True
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
    return False


@pytest.mark.parametrize(
    ("seed", "num_kills", "kv"),
    [(0, 2, ()), *[pytest.param(seed, 5, ("kv",) * (seed % 2), marks=pytest.mark.slow) for seed in range(1, 5)]],
)
def test_kill_minus_nine(llm: LLM, tmp_path: pathlib.Path, seed: int, num_kills: int, kv: tuple[str, ...]) -> None:
    """Within steps and within saves, each time in a new process that goes on with the last state."""
    mock_engine.pace(llm, budget=7, decode_steps=2)
    start(llm, add_requests)
    expected, version = rest(llm), llm.weights_version
    for output in expected.values():
        for sample in output["outputs"]:  # the other processes have their first weights
            sample["weights_versions"] = [number - version for number in sample["weights_versions"]]
    rng = random.Random(seed)
    arguments = [str(tmp_path / "states"), str(tmp_path / "results"), *kv]
    for _ in range(num_kills):
        num_lines = rng.randint(1, 8)  # "step" and "save" in turn
        ended = run_and_kill(arguments, num_lines, rng.uniform(0, 0.25 if num_lines % 2 == 0 else 0.03))
        assert not ended, "it came to its end before it was killed"
    assert run_and_kill(arguments, 10_000, 0)
    lines = (tmp_path / "results").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert {output["request_id"] for output in found} == expected.keys()
    assert all(output == expected[output["request_id"]] for output in found)
