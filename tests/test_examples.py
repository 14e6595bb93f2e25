"""The example scripts, as a person runs them."""

from __future__ import annotations

import io
import pathlib
import subprocess
import sys

import pytest

from pagedjax import LLM

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import chat  # noqa: E402
import generate  # noqa: E402


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
