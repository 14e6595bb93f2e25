"""pagedjax.compile_cache: a loaded engine's programs are kept on disk, and nothing else of the process is."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import mock_engine
import mock_model
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pagedjax import LLM, SamplingParams, compile_cache
from pagedjax.loaders import hub

MODEL = pathlib.Path(__file__).parent / "data" / "tiny" / "qwen2"
OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 1, "max_model_len": 16, "num_blocks": 8, "attention": "xla"}
SETTINGS = (compile_cache.FOLDER_OPTION, compile_cache.LEAST_SECONDS_OPTION, "jax_enable_compilation_cache")
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The process as a user has it who has chosen no cache, with a folder of the test's own in place of the home's."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv(hub.CACHE_VARIABLE, str(tmp_path / "home"))
    jax.config.update(compile_cache.FOLDER_OPTION, None)
    jax.config.update(compile_cache.LEAST_SECONDS_OPTION, 1.0)
    compilation_cache.reset_cache()
    yield tmp_path / "home" / compile_cache.FOLDER
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def kept(folder: pathlib.Path) -> set[str]:
    """Names of the programs in a folder: what jax writes beside them tells when they were used."""
    return {path.name for path in folder.glob("*-cache")}


def compile_something(number: int) -> None:
    """A program that nothing else compiles, of another number for another program."""
    jax.jit(lambda x: jnp.tanh(x) + number)(jnp.zeros(number, jnp.float32))


def test_a_loaded_engine_finds_the_programs_of_the_one_before(home: pathlib.Path) -> None:
    """The first compiles them as they are needed, the second ahead of time."""
    first = LLM.load(MODEL, "float32", **OPTIONS)
    output = first.generate([[1]], PARAMS, use_tqdm=False)[0].outputs[0]
    programs = kept(home)
    assert sum(name.startswith("jit_run-") for name in programs) == len(first.config.token_ladder)

    events: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rsplit("/", 1)[-1]))
    second = LLM.load(MODEL, "float32", **OPTIONS)
    second.warmup()
    assert events.count("cache_hits") >= len(second.config.token_ladder)  # jax has the others in memory
    assert {name for name in kept(home) if name.startswith("jit_run-")} <= programs
    assert second.generate([[1]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == output.token_ids


def test_what_else_the_process_compiles_is_not_kept(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    settings = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update(compile_cache.LEAST_SECONDS_OPTION, 0.0)
    with compile_cache.programs_kept():
        compile_something(101)
    programs = kept(home)
    assert programs
    compile_something(102)
    assert kept(home) == programs
    assert getattr(jax.config, compile_cache.FOLDER_OPTION) == settings[compile_cache.FOLDER_OPTION]

    jax.config.update(compile_cache.FOLDER_OPTION, str(tmp_path / "own"))  # the trainer's, chosen afterwards
    compile_something(103)
    assert kept(tmp_path / "own")
    assert kept(home) == programs


def test_an_engine_made_of_parameters_keeps_nothing(home: pathlib.Path) -> None:
    jax.config.update(compile_cache.LEAST_SECONDS_OPTION, 0.0)
    LLM(mock_model.MockDecoder(), **mock_engine.OPTIONS | {"num_blocks": 37}).defragment()  # a pool of no other test
    assert not home.exists()


@pytest.mark.parametrize(("option", "value"), [("jax_compilation_cache_dir", "own"), ("jax_compilation_cache_dir", "")])
def test_a_folder_that_was_chosen_stays(home: pathlib.Path, tmp_path: pathlib.Path, option: str, value: str) -> None:
    jax.config.update(option, value and str(tmp_path / value))
    with compile_cache.programs_kept():
        assert getattr(jax.config, option) == (value and str(tmp_path / value))
        assert getattr(jax.config, compile_cache.LEAST_SECONDS_OPTION) == 1.0
        compile_something(104)
    assert not home.exists()


def test_it_can_be_switched_off(home: pathlib.Path) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    with compile_cache.programs_kept():
        compile_something(105)
    assert not home.exists()


def test_a_folder_that_cannot_be_made_is_no_error(
    home: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    with caplog.at_level("INFO", "pagedjax"), compile_cache.programs_kept():
        compile_something(106)
    assert "compiled programs are not kept" in caplog.text
    assert home.parent.is_file()


def test_a_folder_that_others_can_write_to_is_not_used(home: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)
    with caplog.at_level("INFO", "pagedjax"), compile_cache.programs_kept():
        compile_something(107)
    assert "others may write" in caplog.text
    assert not kept(home)


def test_settings_come_back_after_an_error(home: pathlib.Path) -> None:
    before = [getattr(jax.config, name) for name in SETTINGS]
    with pytest.raises(ValueError, match="broken"), compile_cache.programs_kept():
        raise ValueError("broken")
    assert [getattr(jax.config, name) for name in SETTINGS] == before


def test_one_scope_within_another_changes_nothing(home: pathlib.Path) -> None:
    with compile_cache.programs_kept(), compile_cache.programs_kept():
        compile_something(108)
    assert getattr(jax.config, compile_cache.FOLDER_OPTION) is None
    assert kept(home)
