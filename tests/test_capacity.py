"""pagedjax.capacity: the arithmetic of paging, its options and errors, and the command line."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
from typing import Any

import pytest

from pagedjax import capacity
from pagedjax.capacity import KVShape
from pagedjax.capacity.__main__ import main
from pagedjax.config import ModelConfig

GIB, MIB, KIB = 2**30, 2**20, 2**10
# 8 billion parameters in float16: 32 layers, 8 KV heads of 128, and weights of 16 GiB.
MODEL_8B = KVShape(32, 8, 128, 16 * GIB, dtype="float16")
SMALL = KVShape(2, 2, 8, 0, dtype="float32")  # 256 bytes a token


def of_8b(memory: str = "80GiB", **options: Any) -> capacity.CapacityPlan:
    return capacity.plan(MODEL_8B, memory, **{"max_model_len": 8192} | options)


# What paging buys, in round figures


def test_bytes_of_a_token_and_of_a_block() -> None:
    plan = of_8b()
    assert (plan.bytes_per_token, plan.bytes_per_block) == (128 * KIB, 2 * MIB)


def test_80_gib() -> None:
    plan = of_8b()
    assert plan.pool_bytes == 56 * GIB
    assert (plan.num_blocks, plan.num_usable_blocks) == (28_672, 28_671)
    assert plan.blocks_per_seq(512) == 32
    assert plan.concurrency(512) == (896, 895, 887)
    assert plan.blocks_per_seq(8192) == 512
    assert plan.contiguous_sequences == 56
    assert plan.concurrency(512).raw == 16 * plan.contiguous_sequences


def test_24_gib() -> None:
    plan = of_8b("24GiB", memory_utilization=1.0)
    assert plan.pool_bytes == 8 * GIB
    assert (plan.num_blocks, plan.num_usable_blocks) == (4096, 4095)
    assert plan.blocks_per_seq(128) == 8
    assert plan.concurrency(128)[:2] == (512, 511)


def test_a_batch_of_64() -> None:
    plan = of_8b()
    assert 64 * plan.blocks_per_seq(256) == 1024
    assert 64 * plan.blocks_per_seq(8192) == 32_768


def test_utilization() -> None:
    assert round(capacity.contiguous_utilization(128, 8192), 3) == 0.016
    assert capacity.paged_utilization(1000, 16) == 1000 / 1008
    assert all(capacity.paged_utilization(tokens, 16) > 0.9 for tokens in range(145, 9000))


def test_block_sizes_for_1000_tokens() -> None:
    costs = capacity.cost_at(1000, (8, 16, 32))
    assert [cost.num_blocks for cost in costs] == [125, 63, 32]
    assert [cost.worst_waste for cost in costs] == [7, 15, 31]
    assert [cost.table_length for cost in costs] == [125, 63, 32]


@pytest.mark.parametrize("size", capacity.BLOCK_SIZES)
def test_block_sizes_over_a_life_agree_with_counting(size: int) -> None:
    lengths = [(5, 9), (64, 1), (17, 100)]
    held = [(p + t, -(-(p + t) // size)) for p, o in lengths for t in range(o)]  # tokens and blocks of each step
    (cost,) = capacity.cost_over_life(lengths, [size])
    assert cost.num_blocks == pytest.approx(sum(blocks for _, blocks in held) / len(held))
    assert cost.utilization == pytest.approx(sum(n for n, _ in held) / sum(size * blocks for _, blocks in held))
    assert cost.table_length == max(blocks for _, blocks in held)


# Options


def test_the_pool_is_what_memory_leaves() -> None:
    plan = capacity.plan(SMALL, 100_000, memory_utilization=0.5, workspace=9_000, block_size=4)
    assert plan.bytes_per_block == 1024
    assert plan.num_blocks == (50_000 - 9_000) // 1024
    assert capacity.plan(SMALL, num_blocks=7).num_blocks == 7
    assert capacity.plan(SMALL, kv_cache_memory_bytes=7 * 4096 + 4095).num_blocks == 7
    assert capacity.plan(SMALL, "1MiB", kv_cache_memory_bytes="16KiB").num_blocks == 4


def test_a_share_of_memory_is_not_rounded_down_by_floats() -> None:
    for utilization in (0.9, 0.7, 0.55, 0.95):
        for gib in range(1, 200):
            share = capacity.kv_memory(gib * GIB, utilization, 0)
            assert share == gib * GIB * round(utilization * 100) // 100


def test_max_model_len_is_the_engines_and_capped_by_the_models() -> None:
    shape = KVShape(2, 2, 8, max_position_embeddings=64)
    assert capacity.plan(SMALL, num_blocks=9).max_model_len == 2048
    assert capacity.plan(shape, num_blocks=9).max_model_len == 64
    plan = capacity.plan(shape, num_blocks=9, max_model_len=65)
    assert plan.max_model_len == 64
    assert "max_model_len 65 is capped at the model's 64 positions" in str(plan)


def test_a_window_bounds_what_a_sequence_holds() -> None:
    windowed = KVShape(2, 2, 8, window=50)
    plan = capacity.plan(windowed, num_blocks=100, block_size=4, max_num_batched_tokens=16)
    assert plan.blocks_per_seq(40) == 10
    assert plan.blocks_per_seq(2048) == -(-(50 + 16 - 1) // 4) + 1
    assert plan.concurrency(2048).raw == 100 // 18


def test_rows_or_blocks_limit() -> None:
    assert capacity.plan(SMALL, num_blocks=65, max_model_len=16).limited_by == "rows"
    assert capacity.plan(SMALL, num_blocks=65, max_model_len=17).limited_by == "blocks"
    lengths: dict[str, Any] = {"mean_prompt_len": 10, "mean_output_len": 6}
    assert capacity.plan(SMALL, num_blocks=66, max_model_len=1024, **lengths).limited_by == "rows"
    assert capacity.plan(SMALL, num_blocks=64, max_model_len=1024, **lengths).limited_by == "blocks"
    assert capacity.plan(SMALL, num_blocks=64, max_num_batched_tokens=8, **lengths).mean_running == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GiB", 80 * GIB), ("80 gb", 80 * 10**9), ("1.5MiB", 3 * MIB // 2), ("123", 123), (123, 123), ("7b", 7)],
)
def test_amounts_of_memory(text: int | str, expected: int) -> None:
    assert capacity.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "80G1B", "-1", -1, "GiB", True, None, 1.5])
def test_no_amounts_of_memory(text: Any) -> None:
    with pytest.raises(ValueError, match="is no amount of memory"):
        capacity.parse_bytes(text)


@pytest.mark.parametrize(
    ("name", "memory_bytes", "platform"),
    [
        *(("H100", 81559 * MIB, "gpu"), ("NVIDIA H100 SXM5", 81559 * MIB, "gpu"), ("h200", 143771 * MIB, "gpu")),
        *(("a100-80gb", 80 * GIB, "gpu"), ("A100 40GB", 40 * GIB, "gpu"), ("B200", 183359 * MIB, "gpu")),
        *(("v4", 32 * GIB, "tpu"), ("TPU v5e", 16 * GIB, "tpu"), ("TPU v5 lite", 16 * GIB, "tpu")),
        *(("v5p", 95 * GIB, "tpu"), ("trillium", 32 * GIB, "tpu"), ("TPU7x", 96 * GIB, "tpu")),
    ],
)
def test_accelerators(name: str, memory_bytes: int, platform: str) -> None:
    device = capacity.plan(SMALL, name).device
    assert (device.memory_bytes, device.platform) == (memory_bytes, platform)
    assert device.accelerator is not None
    assert device.accelerator.source


BAD: list[tuple[dict[str, Any], str]] = [
    ({"device_memory": None}, "give device_memory, num_blocks or kv_cache_memory_bytes"),
    ({"device_memory": "H1000"}, "did you mean H100"),
    ({"device_memory": "A100"}, "write A100-40GB or A100-80GB"),
    ({"device_memory": "80 apples"}, "is no amount of memory"),
    ({"device_memory": "v5e", "platform": "gpu"}, "TPU v5e is a tpu"),
    ({"platform": "abacus"}, "platform='abacus' is not one of"),
    ({"tensor_parallel_size": 2}, "unknown option 'tensor_parallel_size'; use tensor_parallel"),
    ({"gpu_memory_utilization": 0.9}, "use memory_utilization"),
    ({"colour": "red"}, "unknown option 'colour'; the known ones are .*'watermark'"),
    ({"mesh": None}, "plan takes no mesh"),
    ({"tensor_parallel": 0}, "tensor_parallel=0 is not a positive number"),
    ({"memory_utilization": 1.1}, r"memory_utilization=1.1 is not in \(0, 1\]"),
    ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' is not one of"),
    ({"dtype": "float64"}, "dtype='float64' is not one of"),
    ({"num_blocks": 4, "kv_cache_memory_bytes": 10**6}, "both size the pool"),
    ({"num_blocks": 300}, "more than the device's 1 MiB"),
    ({"device_memory": 4551}, "is 0 blocks of 4 KiB, and 2 are the least"),
    ({"workspace": "2MiB"}, r"weights and workspace take 2 MiB of 0.9 x 1 MiB"),
    ({"block_size": 0}, "block_size=0 is too small"),
    ({"mean_prompt_len": 5}, "belong together"),
    ({"mean_prompt_len": 5, "mean_output_len": 0}, "two positive integers"),
    ({"mean_prompt_len": 5, "mean_output_len": 5, "trace": [(1, 1)]}, "give one of them"),
    ({"arrivals": [0]}, "arrivals belong to a trace"),
    ({"trace": [(1, 1)], "arrivals": [0, 1]}, "2 arrivals for 1 requests"),
    ({"trace": [(1, 1), (1, 1)], "arrivals": [1, 0]}, "ascending"),
    ({"trace": []}, "the trace has no requests"),
    ({"trace": [(1, 1), (1,)]}, "request 1 of the trace is"),
    ({"trace": [(1, 1.5)]}, "two positive integers"),
    ({"trace": [(2048, 1)]}, "leaves no room to generate within max_model_len=2048"),
    ({"trace": [(2000, 48)], "num_blocks": 100}, "needs 128 blocks of 16 tokens, and the pool has 99 usable"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(index) for index in range(len(BAD))])
def test_what_is_wrong_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capacity.plan(**{"model": SMALL, "device_memory": "1MiB"} | options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 is not a positive integer"),
        ({"window": -1}, "window=-1"),
        ({"params_bytes": -1}, "params_bytes=-1 is not a number of bytes"),
        ({"dtype": "int8"}, "dtype='int8' is not one of"),
    ],
)
def test_a_shape_that_makes_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVShape(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 8} | fields)


def test_a_config_without_a_dtype_needs_one() -> None:
    config = ModelConfig("llama", 10, 6, 5, 3, 4, 2, 8, 64)
    with pytest.raises(ValueError, match="give dtype='bfloat16'"):
        capacity.plan(config, "1GiB")
    assert capacity.plan(config, "1GiB", dtype="float16").shape.dtype == "float16"


# What people see


def test_the_table_uses_words_that_people_know() -> None:
    text = str(of_8b(mean_prompt_len=161, mean_output_len=338))
    assert "KV cache size" in text
    assert "458,736 tokens" in text
    assert "Maximum concurrency    for 8,192 tokens per request: 56.00x" in text
    assert "rows (max_num_seqs)" in text
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["8", "16", "32", "64"]


def command_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, '
        '"intermediate_size": 8, "vocab_size": 8, "torch_dtype": "float32"}'
    )
    trace = tmp_path / "trace.json"
    trace.write_text(
        '{"requests": [{"prompt_token_ids": [1, 2, 3], "output_len": 5}, {"prompt_len": 2, "output_len": 1}]}'
    )
    code, out, err = command_line(capsys, "--model", str(config), "--memory", "1MiB", "--trace", str(trace))
    assert (code, err) == (0, "")
    assert "2 requests: 2 tokens in, 3 out" in out
    arguments = ("--model", str(tmp_path), "--num-blocks", "9", "--mean-prompt", "4", "--mean-output", "2", "--json")
    code, out, err = command_line(capsys, *arguments)
    assert code == 0
    found = json.loads(out)
    assert found["num_usable_blocks"] == 8
    assert found["bytes_per_token"] == 2 * 8 * 4
    assert found["mean_running"] == 7.0  # one block each, and one block is the watermark


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere", "--memory", "1GiB"], "neither a file or folder nor a known model name"),
        (["--model", "nowhere", "--tensor-parallel-size", "2"], "use tensor_parallel"),
        (["--model", "nowhere", "--trace", "nowhere.json"], "neither a file"),
        (["--model", ".", "--memory", "1GiB"], "is not a checkpoint"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = command_line(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not valid JSON"), ("3", "holds no list"), ('{"a": 1}', "no list")]
)
def test_a_wrong_trace_file(tmp_path: pathlib.Path, content: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        capacity.plan(SMALL, num_blocks=9, trace=path)


@pytest.fixture
def example() -> Any:
    """examples/capacity.py, under another name than the module it is about."""
    path = pathlib.Path(__file__).parent.parent / "examples" / "capacity.py"
    spec = importlib.util.spec_from_file_location("capacity_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--requests", "40", "--memory", "17.9GiB", "--max-model-len", "1024"]
    monkeypatch.setattr(sys, "argv", ["capacity.py", *arguments])
    example.main()
    tables = [table.splitlines() for table in capsys.readouterr().out.split("\n\n")]
    sizes = [line.split() for line in tables[0][2:]]
    assert [(line[1], line[2], line[4]) for line in sizes[:3]] == [
        *(("125.0", "7", "125"), ("63.0", "15", "63"), ("32.0", "31", "32")),
    ]
    assert len(tables[2]) == 2 + len(capacity.BLOCK_SIZES)
    assert any(line.startswith("KV cache size") for line in tables[3])


def test_the_example_says_what_is_wrong(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["capacity.py", "--memory", "8 apples"])
    with pytest.raises(SystemExit, match="error: '8 apples' is no amount of memory"):
        example.main()
