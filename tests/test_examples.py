"""The example scripts, as a person runs them."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, Decoder, Parity, RolloutArrays

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import capacity  # noqa: E402
import chat  # noqa: E402
import generate  # noqa: E402
import own_model  # noqa: E402
import rl_grpo  # noqa: E402
import train_then_generate  # noqa: E402


@pytest.fixture
def loaded(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The scripts get an engine that is there already."""
    for script in (chat, generate):
        monkeypatch.setattr(script, "load", lambda options: smollm2)
    return smollm2


def run(script: object, monkeypatch: pytest.MonkeyPatch, *arguments: str, stdin: str = "") -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    script.main()  # type: ignore[attr-defined]


def test_generate(loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(generate, monkeypatch, "What is the capital of France?", "--max-tokens", "16")
    out, err = capsys.readouterr()
    assert out == "> What is the capital of France?\nThe capital of France is Paris.\n\n"
    assert "tokens/s" in err
    assert "KV usage" in err


def test_generate_from_a_file_and_from_stdin(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "prompts.txt").write_text("The capital of France is\n\nTwo plus two is\n")
    run(generate, monkeypatch, "--raw", "--max-tokens", "4", "--file", str(tmp_path / "prompts.txt"))
    from_file = capsys.readouterr().out
    run(generate, monkeypatch, "--raw", "--max-tokens", "4", stdin="The capital of France is\nTwo plus two is\n")
    assert capsys.readouterr().out == from_file
    assert from_file.count("> ") == 2
    assert "Paris" in from_file


def test_generate_samples(loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "Name a colour.",
        "--temperature",
        "1.5",
        "--top-p",
        "0.95",
        "--seed",
        "3",
        "-n",
        "2",
        "--max-tokens",
        "8",
    ]
    run(generate, monkeypatch, *options)
    first = capsys.readouterr().out
    run(generate, monkeypatch, *options)
    assert capsys.readouterr().out == first
    assert "[0] " in first
    assert "[1] " in first


def test_chat_streams_and_remembers(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(chat, monkeypatch, "--max-tokens", "12", stdin="What is the capital of France?\nAnd of Italy?\n")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "The capital of France is Paris."
    assert "Rome" in "".join(lines[1:])


@pytest.mark.parametrize("arguments", [["--top-p", "2"], ["--model", "no-such-model"], ["--max-tokens", "0"]])
def test_a_wrong_option_is_one_line(arguments: list[str]) -> None:
    command = [sys.executable, str(EXAMPLES / "generate.py"), "hello", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


WRONG = [
    (capacity, ["--tokens", "0"]),
    (capacity, ["--max-model-len", "3"]),
    (chat, ["--top-p", "2"]),
    (rl_grpo, ["--steps", "0"]),
    (rl_grpo, ["--seed", "-1"]),
    (rl_grpo, ["--seed", str(2**63)]),
    (rl_grpo, ["--out", "file"]),
    (rl_grpo, ["--resume"]),
    (train_then_generate, ["--steps", "0"]),
    (train_then_generate, ["--seed", str(2**63)]),
    (train_then_generate, ["--length", "0"]),
    (train_then_generate, ["--text", "file"]),
    (train_then_generate, ["--text", "no-such-file"]),
    (train_then_generate, ["--out", "file"]),
    (train_then_generate, ["--out", "."]),
    (train_then_generate, ["--prompts", "fits", "x" * 256]),
    (train_then_generate, ["--prompts", ""]),
]


@pytest.mark.parametrize(("script", "arguments"), WRONG)
def test_every_wrong_option_is_one_line_before_any_work(
    script: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("has begun")

    for name in {"load", "tqdm", "LLM"} & vars(script).keys():
        monkeypatch.setattr(script, name, work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("short")
    with pytest.raises(SystemExit) as ended:
        run(script, monkeypatch, *arguments)
    message = ended.value.code
    assert isinstance(message, str)
    assert message.startswith("error: ")
    assert "\n" not in message


def test_own_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(own_model, monkeypatch)
    out = capsys.readouterr().out
    assert out.count("... -> [") == 3
    assert "36 tokens: |difference of logprobs| max" in out


@pytest.mark.parametrize("difference", [2 * own_model.ROUNDING, np.nan])
def test_own_model_ends_in_an_error_where_it_differs(monkeypatch: pytest.MonkeyPatch, difference: float) -> None:
    monkeypatch.setattr(own_model, "run", lambda: Parity(np.array([0.0, difference])))
    with pytest.raises(SystemExit, match="differ by more than rounding"):
        run(own_model, monkeypatch)


@pytest.mark.slow
def test_own_model_notices_wrong_paging(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers in the pages of the first: each writes before it reads, so a prompt alone would be right."""
    paged = own_model.attention.paged
    monkeypatch.setattr(own_model.attention, "paged", lambda batch, layer, *rest: paged(batch, layer * 0, *rest))
    assert own_model.run().max_difference > 0.1


@pytest.mark.slow  # compiles for itself
def test_own_model_on_a_mesh() -> None:
    code = "import jax, own_model; print(own_model.run(jax.make_mesh((2,), ('tensor',))).max_difference)"
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    flags |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{EXAMPLES.parent}"}
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.splitlines()[-1]) < own_model.ROUNDING


def test_train_then_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """In fewer steps than the learning rate rises for, and in place of an earlier run's checkpoint."""
    (tmp_path / "text").write_text("abc" * 100)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pagedjax.json").write_text("{}")
    arguments = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "out"), "--prompts", "abcab"]
    run(train_then_generate, monkeypatch, "--steps", "15", "--batch", "4", "--length", "16", *arguments)
    out, err = capsys.readouterr()
    assert float(err.split("loss ")[-1].split()[0]) < np.log(256) - 1
    assert out.startswith("> abcab")
    answer = out[len("> abcab") :]
    assert sum(answer.count(letter) for letter in "abc") > 100, "of 120 bytes"


def train(monkeypatch: pytest.MonkeyPatch, out: pathlib.Path, *arguments: str) -> list[rl_grpo.Record]:
    """The table of a GRPO run."""
    run(rl_grpo, monkeypatch, "--out", str(out), *arguments)
    with (out / "rewards.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    return [rl_grpo.Record(*map(json.loads, row)) for row in rows]


def test_grpo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    records = train(monkeypatch, tmp_path, "--steps", "3", "--tasks", "8", "--group", "8")
    out, err = capsys.readouterr()
    assert "programs were compiled in the steps [0]\n" in out
    if importlib.util.find_spec("matplotlib") is None:
        assert "matplotlib is not there" in err
    else:
        assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert [record.num_compiled > 0 for record in records] == [True, False, False]
    assert all(0 <= record.difference < 1e-4 for record in records)
    assert any(0 < record.reward < 1 for record in records)

    with pytest.raises(SystemExit, match="began with --seed 0 --group 8;"):
        train(monkeypatch, tmp_path, "--resume", "--steps", "4", "--tasks", "8", "--group", "4", "--seed", "1")


@pytest.mark.slow
def test_grpo_goes_on_as_if_never_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    arguments = ("--steps", "4", "--tasks", "8", "--group", "8", "--save-every", "2")
    whole = train(monkeypatch, tmp_path, *arguments)
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if it had been killed before this one was written,
    (tmp_path / "rewards.csv").write_text("")  # and while the table was
    both = train(monkeypatch, tmp_path, *arguments, "--resume")
    assert both[:2] == whole[:2]
    assert both[2:] != whole[2:]  # other seconds
    assert [(record.step, record.reward, record.difference) for record in both] == [
        (record.step, record.reward, record.difference) for record in whole
    ]


def test_grpo_does_not_mix_two_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit, match="leave out --resume"):
        train(monkeypatch, tmp_path, "--resume")
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(SystemExit, match="add --resume"):
        train(monkeypatch, tmp_path)
    with pytest.raises(SystemExit, match="at least 1"):
        train(monkeypatch, tmp_path, "--steps", "0")


def test_grpo_rewards_right_answers_alone() -> None:
    task = [3, 1, 9, 0, 1, 5, rl_grpo.SORT]
    right = [*task, 0, 1, 1, 3, 5, 9, rl_grpo.END]
    wrong = [
        [*task, 0, 1, 1, 3, 5, 9, 9],  # does not end
        [*task, 0, 1, 3, 5, 9, rl_grpo.END, rl_grpo.PAD],  # sorted, one is missing
        [*task, 0, 0, 1, 3, 5, 9, rl_grpo.END],  # sorted, of other digits
        [*task, *task[:-1], rl_grpo.END],  # not sorted
        [*task, rl_grpo.END, *[rl_grpo.PAD] * 6],
    ]
    assert rl_grpo.rewards(np.array([*wrong, right], np.int32)).tolist() == [0, 0, 0, 0, 0, 1]
    values = np.array([0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0], np.float32)
    third = [np.sqrt(3), *[-1 / np.sqrt(3)] * 3]
    np.testing.assert_allclose(rl_grpo.advantages(values, 4), [-1, -1, 1, 1, 0, 0, 0, 0, *third], rtol=1e-3)


def test_grpo_loss_is_the_formula() -> None:
    rng = np.random.default_rng(0)
    graphdef, params = nnx.split(Decoder(rl_grpo.CONFIG, rngs=nnx.Rngs(0)))
    tokens = rng.integers(0, 16, (4, rl_grpo.LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(rl_grpo.LENGTH, dtype=np.int32), tokens.shape)
    dense = np.asarray(jax.nn.log_softmax(nnx.merge(graphdef, params)(jnp.asarray(tokens))), np.float64)
    lengths, advantage = [7, 3, 1, 5], rng.normal(size=4).astype(np.float32)
    old, mask, samples = np.zeros(tokens.shape), np.zeros(tokens.shape, bool), []
    for line, length in enumerate(lengths):
        gains = []
        for place in range(7, 7 + length):
            new = dense[line, place - 1, tokens[line, place]]
            old[line, place], mask[line, place] = new + rng.normal(scale=0.3), True
            ratio = np.exp(new - old[line, place])
            clipped = min(max(ratio, 0.8), 1.2)
            gains.append(min(ratio * advantage[line], clipped * advantage[line]))
        samples.append(np.mean(gains))
    unused = {"sampled_logprobs": old, "kept_masses": old, "weights_versions": mask, "prompt_lens": tokens[:, 0]}
    unused |= {"lengths": tokens[:, 0], "prompt_index": tokens[:, 0], "complete": mask[:, 0]}
    batch = RolloutArrays(tokens=tokens, positions=positions, mask=mask, logprobs=old.astype(np.float32), **unused)
    loss, difference = rl_grpo.grpo_loss(graphdef, params, batch, advantage)
    np.testing.assert_allclose(loss, -np.mean(samples), rtol=1e-4)
    new = np.take_along_axis(dense[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(difference, np.abs((new - old[:, 1:]) * mask[:, 1:]).max(), rtol=1e-4)


@pytest.mark.slow
def test_grpo_doubles_the_reward(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    rewards = [record.reward for record in train(monkeypatch, tmp_path)]
    assert np.mean(rewards[-10:]) >= 2 * np.mean(rewards[:10])
