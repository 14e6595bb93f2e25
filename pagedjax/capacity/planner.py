"""From a model and a device's memory to a plan: which options there are, and the order in which they are applied.

Memory for K/V = memory_utilization * device memory - weights - workspace; blocks = what of them fits.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, get_args

from pagedjax.capacity.accelerators import Platform, find_accelerator
from pagedjax.capacity.capacity_plan import CapacityPlan, Device
from pagedjax.capacity.device_share import Share, share_of_config, share_of_shape
from pagedjax.capacity.kv_shape import KVShape
from pagedjax.capacity.model_source import Model, read_model
from pagedjax.capacity.pool import LEAST_BLOCKS, kv_memory, num_blocks_in
from pagedjax.capacity.replay import replay
from pagedjax.capacity.trace import check_arrivals, check_trace
from pagedjax.capacity.units import parse_bytes, show_bytes
from pagedjax.config import ModelConfig
from pagedjax.engine_config import EngineConfig

# The names that other engines have for options of `plan`.
_OTHER_NAMES = {
    "tensor_parallel_size": "tensor_parallel",
    "tp": "tensor_parallel",
    "gpu_memory_utilization": "memory_utilization",
    "mem_fraction_static": "memory_utilization",
    "num_gpu_blocks_override": "num_blocks",
    "max_seq_len": "max_model_len",
    "page_size": "block_size",
    "memory": "device_memory",
}


def plan(
    model: Model,
    device_memory: int | str | None = None,
    *,
    memory_utilization: float = 0.9,
    block_size: int = 16,
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    dtype: str | None = None,
    tensor_parallel: int = 1,
    platform: Platform | None = None,
    workspace: int | str = 0,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | str | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    watermark: float = 0.01,
    mean_prompt_len: float | None = None,
    mean_output_len: float | None = None,
    trace: Iterable[tuple[int, int]] | str | os.PathLike[str] | None = None,
    arrivals: Sequence[float] | None = None,
    **unknown: Any,
) -> CapacityPlan:
    """How much fits a device: blocks, tokens and sequences, and how many rows will run. Needs no device, and no jax.

    Options that the engine has too mean the same there. All bytes are those of one device.

    Args:
        model: a `ModelConfig`; a config.json, a Hugging Face folder (weights may be missing), a GGUF file, a checkpoint
            of this package or a name that `LLM.load` knows; or a `KVShape`.
        device_memory: bytes, a text such as "80GiB" or "80GB" (10^9), or an accelerator's name such as "H100" or "v5e".
            May be None where `num_blocks` or `kv_cache_memory_bytes` is given.
        memory_utilization: share of it that weights, workspace and K/V may take.
        block_size: tokens a block.
        max_model_len: tokens a sequence; None: the engine's default. Capped by the model's own limit.
        kv_cache_dtype: "auto" (that of the weights), "float32", "bfloat16" or "float16"; or quantised: "int8", "fp8".
        dtype: of the weights; None: as stored. A `ModelConfig` stores none.
        tensor_parallel: devices that the model is divided over, as the engine's `mesh` does it.
        platform: "tpu", "gpu" or "cpu", which decides whether the pool's lines are padded; implied by an accelerator's
            name. None: not padded.
        workspace: bytes, or a text, that a step needs beside weights and K/V.
        num_blocks: of the pool, the null block included, instead of what fits.
        kv_cache_memory_bytes: of the pool, instead of what fits.
        max_num_seqs: rows.
        max_num_batched_tokens: tokens a step.
        watermark: share of the blocks kept free when a sequence is admitted beside running ones.
        mean_prompt_len: with `mean_output_len`: all requests are taken to be as long as this, with a queue that never
            ends.
        mean_output_len: generated tokens.
        trace: prompt and output tokens of requests in order of arrival, or a JSON file of them: they are run through
            the scheduler's rules (`pagedjax.capacity.replay`). Prefix sharing and early ends are not known here.
        arrivals: for a trace, the step at which each request arrives, ascending; None: all at once.

    Raises:
        ValueError: an option does not make sense or is not known, or nothing fits; the message says what to change.
    """
    if unknown:
        _refuse(unknown)
    engine = EngineConfig(
        max_model_len=EngineConfig.max_model_len if max_model_len is None else max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_memory_bytes=None if kv_cache_memory_bytes is None else parse_bytes(kv_cache_memory_bytes),
        memory_utilization=memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        watermark=watermark,
    )
    device = _device(device_memory, platform)
    share = _share(model, dtype, tensor_parallel)
    shape, workspace_bytes = share.shape, parse_bytes(workspace)
    block_bytes = shape.bytes_per_block(block_size, kv_cache_dtype, device.platform)
    num_blocks = _num_blocks(engine, device.memory_bytes, shape.params_bytes + workspace_bytes, block_bytes)
    longest = min(engine.max_model_len, shape.max_position_embeddings or engine.max_model_len)
    base = CapacityPlan(
        model=_name(model),
        shape=shape,
        device=device,
        memory_utilization=memory_utilization,
        workspace_bytes=workspace_bytes,
        tensor_parallel=tensor_parallel,
        kv_cache_dtype=shape.stored_dtype(kv_cache_dtype),
        block_size=block_size,
        bytes_per_block=block_bytes,
        num_blocks=num_blocks,
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        watermark=watermark,
        notes=_notes(share, device, max_model_len, longest),
    )
    return _with_load(base, mean_prompt_len, mean_output_len, trace, arrivals)


def _with_load(
    base: CapacityPlan,
    mean_prompt_len: float | None,
    mean_output_len: float | None,
    trace: Iterable[tuple[int, int]] | str | os.PathLike[str] | None,
    arrivals: Sequence[float] | None,
) -> CapacityPlan:
    """The plan for requests of these lengths, if there are any."""
    means = (mean_prompt_len, mean_output_len)
    if trace is not None and means != (None, None):
        raise ValueError("mean lengths and a trace both describe the requests; give one of them")
    if arrivals is not None and trace is None:
        raise ValueError("arrivals belong to a trace; give it as well")
    if trace is None and means == (None, None):
        return base
    if trace is None:
        if mean_prompt_len is None or mean_output_len is None:
            raise ValueError(f"{mean_prompt_len=} and {mean_output_len=} belong together; give both")
        mean = (round(mean_prompt_len), round(mean_output_len))
        return dataclasses.replace(base, lengths=check_trace([mean], base.max_model_len), lengths_are_means=True)
    lengths = check_trace(trace, base.max_model_len)
    if arrivals is not None:
        check_arrivals(arrivals, lengths)
    replayed = replay(
        lengths,
        num_usable_blocks=base.num_usable_blocks,
        counts=base.counts,
        max_num_seqs=base.max_num_seqs,
        max_num_batched_tokens=base.max_num_batched_tokens,
        watermark=base.watermark,
        arrivals=arrivals,
    )
    return dataclasses.replace(base, lengths=lengths, replay=replayed)


def _refuse(unknown: dict[str, Any]) -> NoReturn:
    name = next(iter(unknown))
    if name == "mesh":
        raise ValueError("plan takes no mesh, which has devices; tensor_parallel is their number")
    hint = _OTHER_NAMES.get(name)
    known = [*inspect.signature(plan).parameters][:-1]
    raise ValueError(f"unknown option {name!r}; " + (f"use {hint}" if hint else f"the known ones are {known}"))


def _device(memory: int | str | None, platform: Platform | None) -> Device:
    if platform is not None and platform not in get_args(Platform):
        raise ValueError(f"platform={platform!r} is not one of {get_args(Platform)}")
    if isinstance(memory, str) and not memory.lstrip()[:1].isdigit():
        accelerator = find_accelerator(memory)
        if platform not in (None, accelerator.platform):
            raise ValueError(f"platform={platform!r}, but {accelerator.name} is a {accelerator.platform}")
        return Device(accelerator.memory_bytes, accelerator.platform, accelerator)
    return Device(None if memory is None else parse_bytes(memory), platform)


def _share(model: Model, dtype: str | None, num_devices: int) -> Share:
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(f"tensor_parallel={num_devices!r} is not a positive number of devices")
    found, dtype = read_model(model, dtype)
    if isinstance(found, ModelConfig):
        return share_of_config(found, dtype, num_devices)
    return share_of_shape(dataclasses.replace(found, dtype=dtype), num_devices)


def _num_blocks(engine: EngineConfig, memory: int | None, used: int, block_bytes: int) -> int:
    """Blocks of the pool, the null block included; `used` bytes are taken by all else."""
    if engine.num_blocks is not None:
        pool = engine.num_blocks * block_bytes
    elif engine.kv_cache_memory_bytes is not None:
        pool = engine.kv_cache_memory_bytes
    elif memory is not None:
        pool = kv_memory(memory, engine.memory_utilization, used)
    else:
        raise ValueError("the size of the pool is not known; give device_memory, num_blocks or kv_cache_memory_bytes")
    num_blocks = num_blocks_in(pool, block_bytes)
    if memory is not None and used + pool > memory:
        raise ValueError(
            f"weights and workspace take {show_bytes(used)} and the pool {show_bytes(pool)}, more than the device's "
            f"{show_bytes(memory)}; take a larger device, more of them (tensor_parallel) or a smaller dtype"
        )
    if num_blocks < LEAST_BLOCKS:
        raise ValueError(
            f"{show_bytes(max(pool, 0))} are left for K/V, which is {max(num_blocks, 0)} blocks of "
            f"{show_bytes(block_bytes)}, and {LEAST_BLOCKS} are the least (one is the null block): weights and "
            f"workspace take {show_bytes(used)}"
            + ("" if memory is None else f" of {engine.memory_utilization:g} x {show_bytes(memory)}")
            + "; take a larger device, more of them (tensor_parallel) or a smaller dtype"
        )
    return num_blocks


def _notes(share: Share, device: Device, asked: int | None, longest: int) -> tuple[str, ...]:
    """What one may not expect."""
    notes = [share.note, device.note]
    if asked is not None and asked != longest:
        notes.append(f"max_model_len {asked:,} is capped at the model's {longest:,} positions")
    return tuple(note for note in notes if note)


def _name(model: Model) -> str:
    if isinstance(model, ModelConfig):
        return model.family
    return "sizes as given" if isinstance(model, KVShape) else os.fspath(model)
