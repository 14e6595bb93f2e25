"""pagedjax.tensor_parallel: engines on a mesh, in processes that have more than one device each or are several."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import mesh_models
import pytest

TESTS = pathlib.Path(__file__).parent
SECONDS = 600  # after which something hangs


def environment(num_devices: int) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # it compiles in half the time
    }


def run_on_eight_devices(which: str) -> None:
    files = ["on_eight_devices.py", "options_on_eight_devices.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, *files]
    result = subprocess.run(command, cwd=TESTS, env=environment(8), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_on_eight_devices() -> None:
    run_on_eight_devices("not slow")


@pytest.mark.slow
def test_on_eight_devices_in_every_form() -> None:
    run_on_eight_devices("slow")


def run_in_two_processes(folder: pathlib.Path, *what: str) -> dict[str, Any]:
    """What both of them say."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "error", str(TESTS / "one_of_two_processes.py"), port]
    processes = [
        subprocess.Popen(
            [*command, str(index), str(folder), *what],
            env=environment(2),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    one, other = (json.loads((folder / f"{index}.json").read_text()) for index in range(2))
    assert one == other
    return one


@pytest.mark.slow  # each compiles for itself
def test_two_processes_agree(tmp_path: pathlib.Path) -> None:
    """Two devices each, four in all; and what they say is what one device says."""
    check_greedy(run_in_two_processes(tmp_path)["greedy"], seed=0)


@pytest.mark.slow
def test_two_processes_agree_in_everything(tmp_path: pathlib.Path) -> None:
    """Also in what they go on with from a saved state."""
    said = run_in_two_processes(tmp_path, "everything")
    check_greedy(said["new weights"], seed=1)
    assert len({tuple(ids) for output in said["sampled"] for ids, _ in output}) > len(mesh_models.PROMPTS)
    _, expected, recomputed, resumed = said["saved"]
    for found in (recomputed, resumed):
        for ((ids, logprob),), ((expected_ids, expected_logprob),) in zip(found, expected, strict=True):
            assert ids == expected_ids
            assert logprob == pytest.approx(expected_logprob, abs=1e-3)


def check_greedy(found: list[Any], seed: int) -> None:
    params = mesh_models.split("llama", seed)[1]
    for prompt, ((token_ids, logprob),) in zip(mesh_models.PROMPTS, found, strict=True):
        mesh_models.assert_most_likely("llama", params, prompt, token_ids, logprob)
