"""pagedjax.memory and pagedjax.workspace: the pool is as large as the device allows, and the plan says why."""

from __future__ import annotations

import math
from typing import Any

import jax
import mock_engine
import mock_model
import pytest
from flax import nnx

from pagedjax import LLM, Decoder, ModelConfig, capacity, memory, workspace
from pagedjax.capacity import EnginePlan
from pagedjax.engine_config import DEFAULT_CPU_KV_BYTES, EngineConfig
from pagedjax.memory import DeviceMemory, pool_size
from pagedjax.workspace import Workspace

CONFIG = ModelConfig("llama", 16, 8, 8, 1, 2, 1, 4, 16)
OPTIONS: dict[str, Any] = {
    "max_model_len": 16,
    "block_size": 4,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 4,
    "decode_steps": 1,
    "batch_invariant": True,  # one step program
}
NEEDS = Workspace(step_bytes=1000, row_bytes=500, table_bytes_per_block=12)


def report(monkeypatch: pytest.MonkeyPatch, limit: int, in_use: int) -> None:
    """The device says so from now on."""
    monkeypatch.setattr(memory, "device_memory", lambda: DeviceMemory(limit, in_use))


def num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def needs_of(llm: LLM) -> int:
    """Temporaries, results and code of the one step there is, as it is compiled for the pool there is."""
    (name,) = (name for name in llm._runner.program_names if name.startswith("step"))
    analysis = llm._runner._program(name).memory_analysis()  # type: ignore[attr-defined]
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    assert results >= 0
    return analysis.temp_size_in_bytes + results + analysis.generated_code_size_in_bytes


@pytest.mark.slow
def test_all_that_is_compiled_and_reserved_fits_and_no_block_more(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use, limit = 12_345, 10**6
    report(monkeypatch, limit, in_use)
    found: list[Workspace] = []
    measure = workspace.measure
    monkeypatch.setattr(
        workspace, "measure", lambda *args, **options: found.append(measure(*args, **options)) or found[0]
    )
    llm = LLM(Decoder(CONFIG, rngs=nnx.Rngs(0)), **OPTIONS)
    state, needs = llm._runner.state, needs_of(llm)
    assert llm.plan.pool_bytes > limit / 2
    # It is measured with the least pool there is, and does not depend on that.
    assert found[0].step_bytes == needs
    beside_pool = found[0].row_bytes + llm.plan.num_blocks * found[0].table_bytes_per_block
    assert beside_pool == num_bytes((state.table, state.rows))
    total = in_use + num_bytes(state) + needs
    assert total <= 0.9 * limit < total + llm.plan.block_bytes + found[0].table_bytes_per_block
    text = f"0.9 of the 976.56 KiB that jax may take, less {capacity.show_bytes(in_use)} in use and "
    assert text in llm.plan.sized_by
    assert text in str(llm.plan)


def test_the_largest_step_of_each_kind_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Lowered:
        """As much memory as places, and a tenth for code; results are in place but for one byte."""

        def __init__(self, *_: Any, num_tokens: int, max_proposals: int, num_vocab_tokens: int) -> None:
            asked.append((num_tokens, max_proposals))
            self.temp_size_in_bytes, self.generated_code_size_in_bytes = num_tokens, num_tokens // 10
            self.output_size_in_bytes, self.alias_size_in_bytes = 100, 99

        def compile(self) -> Lowered:
            return self

        def memory_analysis(self) -> Lowered:
            return self

    monkeypatch.setattr(workspace, "lower_step", Lowered)
    sizes: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 30, "max_num_batched_tokens": 70}
    given: dict[str, Any] = {"kv_dtype": "float32", "num_vocab_tokens": 1}
    plain = workspace.measure(None, None, EngineConfig(**sizes), mock_model.CONFIG, **given)
    assert asked == [(70, 0)]
    assert plain.step_bytes == 71 + 7 * len(EngineConfig(**sizes).token_ladder)
    asked.clear()
    workspace.measure(None, None, EngineConfig(**sizes, num_speculative_tokens=1), mock_model.CONFIG, **given)
    assert asked == [(70, 0), (60, 1)]


def test_explicit_sizes_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr(memory, "device_memory", fail)
    assert pool_size(EngineConfig(num_blocks=9), 100, fail).num_blocks == 9
    size = pool_size(EngineConfig(kv_cache_memory_bytes=10**6), 100, fail)
    assert (size.num_blocks, size.reason) == (10**4, "kv_cache_memory_bytes")


def test_the_device_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    report(monkeypatch, 100_000, 20_000)
    config = EngineConfig(memory_utilization=0.7)
    assert pool_size(config, 100, lambda: NEEDS).num_blocks == (70_000 - 20_000 - 1500) // 112
    report(monkeypatch, 100_000, 69_000)
    with pytest.raises(ValueError, match=r"-500 bytes hold 0 KV blocks of 112 bytes.*0.7 of the 97.66 KiB"):
        pool_size(config, 100, lambda: NEEDS)


def test_blocks_that_no_row_can_use_are_of_use_to_the_cache_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_use = 4 * 3
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 33}
    cached = EngineConfig(**sizes)
    alone = EngineConfig(**sizes, enable_prefix_caching=False)
    given = {"kv_cache_memory_bytes": 10**6}
    assert pool_size(EngineConfig(**sizes, **given), 100, lambda: NEEDS).num_blocks == 10**4
    size = pool_size(EngineConfig(**sizes, **given, enable_prefix_caching=False), 100, lambda: NEEDS)
    assert (size.num_blocks, size.reason) == (rows_use + 1, "what all rows can use")
    # A CPU reports nothing; its default is for models that need it.
    assert pool_size(cached, 100, lambda: NEEDS).num_blocks == memory.MOST_OF_ROWS * rows_use + 1
    assert pool_size(alone, 100, lambda: NEEDS).num_blocks == rows_use + 1
    assert pool_size(cached, 2**28, lambda: NEEDS).num_blocks == DEFAULT_CPU_KV_BYTES // 2**28
    report(monkeypatch, 10**6, 0)
    assert pool_size(cached, 100, lambda: NEEDS).num_blocks == (900_000 - 1500) // 112
    assert pool_size(alone, 100, lambda: NEEDS).num_blocks == rows_use + 1


def test_a_cpu_reports_no_memory() -> None:
    assert memory.device_memory() is None


# What is printed


def engine_plan(**changes: Any) -> EnginePlan:
    fields: dict[str, Any] = {
        "num_blocks": 257,
        "block_size": 16,
        "block_bytes": 2**20,
        "kv_cache_dtype": "bfloat16",
        "params_bytes": 2**30,
        "max_num_seqs": 64,
        "max_model_len": 2048,
        "programs": ("rows", "step[4]"),
    }
    return EnginePlan(**fields | changes)


def test_the_engines_plan_says_what_limits_concurrency() -> None:
    text = str(engine_plan())
    assert "257 MiB: 257 blocks of 16 tokens, by num_blocks" in text
    assert "KV cache size          4,096 tokens (64.00 KiB each, bfloat16)" in text
    assert "Maximum concurrency    for 2,048 tokens per request: 2.00x" in text
    assert "blocks, where sequences have more than 64 tokens on average; else rows (max_num_seqs=64)" in text
    assert "rows (max_num_seqs=2): the blocks would carry more" in str(engine_plan(max_num_seqs=2))
    plan = engine_plan(max_num_batched_tokens=2)
    assert plan.limited_by == "rows"
    assert "rows (max_num_batched_tokens=2)" in str(plan)


def test_a_window_lets_more_sequences_in() -> None:
    plan = engine_plan(window=100, max_num_batched_tokens=61)
    assert plan.blocks_at_max_len == math.ceil(160 / 16) + 1
    assert plan.concurrency_at_max_len == 256 // 11


def test_the_engines_plan_is_the_planners() -> None:
    llm = mock_engine.engine()
    planned = capacity.plan(
        capacity.KVShape(
            mock_model.NUM_LAYERS, 1, 8, 4, dtype="float32", max_position_embeddings=mock_model.MAX_MODEL_LEN
        ),
        kv_cache_memory_bytes=llm.plan.pool_bytes,
        block_size=llm.config.block_size,
        max_num_batched_tokens=llm.config.max_num_batched_tokens,
    )
    for name in ("num_blocks", "num_usable_blocks", "num_slots", "pool_bytes", "max_model_len", "kv_cache_dtype"):
        assert getattr(planned, name) == getattr(llm.plan, name), name
    assert planned.concurrency(llm.plan.max_model_len).usable == llm.plan.concurrency_at_max_len
