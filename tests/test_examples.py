"""The example scripts, as a person runs them."""

from __future__ import annotations

import importlib.util
import io
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, Decoder, RolloutArrays

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import chat  # noqa: E402
import generate  # noqa: E402
import rl_grpo  # noqa: E402


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


def train(monkeypatch: pytest.MonkeyPatch, out: pathlib.Path, *arguments: str) -> list[rl_grpo.Record]:
    """The table of a GRPO run."""
    run(rl_grpo, monkeypatch, "--out", str(out), *arguments)
    return rl_grpo.read_table(out / "rewards.csv")


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


@pytest.mark.slow
def test_grpo_goes_on_as_if_never_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    arguments = ("--steps", "4", "--tasks", "8", "--group", "8", "--save-every", "2")
    whole = train(monkeypatch, tmp_path, *arguments)
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if it had been stopped before this one was written
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
