"""A capacity plan as text for people: one line a figure."""

from __future__ import annotations

from pagedjax.capacity.capacity_plan import CapacityPlan
from pagedjax.capacity.units import show_bytes


def table(plan: CapacityPlan) -> str:
    """Memory, blocks, concurrency, the requests' figures, and what block sizes would cost."""
    rows = [*_memory_rows(plan), *_concurrency_rows(plan), *_load_rows(plan)]
    rows += [("note", note) for note in plan.notes]
    width = max(len(name) for name, _ in rows)
    return "\n".join([*(f"{name:<{width}}  {value}" for name, value in rows), "", *_block_size_lines(plan)])


def _memory_rows(plan: CapacityPlan) -> list[tuple[str, str]]:
    shape, device = plan.shape, plan.device
    devices = f", each of {plan.tensor_parallel} devices" if plan.tensor_parallel > 1 else ""
    rows = [("model", f"{plan.model}: {shape.num_layers} layers, {shape.num_kv_heads} KV heads of {shape.head_dim}")]
    rows[0] = ("model", rows[0][1] + devices)
    if device.memory_bytes is not None:
        source = f" ({device.accelerator.name}: {device.accelerator.source})" if device.accelerator else ""
        rows.append(
            ("device memory", f"{show_bytes(device.memory_bytes)}{source}, of which {plan.memory_utilization:g}")
        )
    rows.append(("weights", f"{show_bytes(shape.params_bytes)}, {shape.dtype}"))
    if plan.workspace_bytes:
        rows.append(("workspace", show_bytes(plan.workspace_bytes)))
    blocks = f"{plan.num_blocks:,} blocks of {plan.block_size} tokens ({plan.num_usable_blocks:,} usable)"
    rows.append(("KV pool", f"{show_bytes(plan.pool_bytes)}: {blocks}, {show_bytes(plan.bytes_per_block)} each"))
    each = f"{show_bytes(plan.bytes_per_token)} each, {plan.kv_cache_dtype}"
    rows.append(("KV cache size", f"{plan.num_slots:,} tokens ({each})"))
    return rows


def _concurrency_rows(plan: CapacityPlan) -> list[tuple[str, str]]:
    longest = plan.max_model_len
    at_once = plan.num_usable_blocks / plan.blocks_per_seq(longest)
    contiguous = f"{plan.contiguous_sequences:,} sequences of any length, with {longest:,} tokens set aside for each"
    limit = "rows (max_num_seqs)" if plan.limited_by == "rows" else "blocks (memory)"
    return [
        ("Maximum concurrency", f"for {longest:,} tokens per request: {at_once:.2f}x"),
        ("contiguous instead", contiguous),
        ("rows", f"{plan.max_num_seqs:,}; concurrency is limited by {limit}"),
    ]


def _load_rows(plan: CapacityPlan) -> list[tuple[str, str]]:
    if plan.lengths is None or plan.mean_blocks is None:
        return []
    num_requests = len(plan.lengths)
    prompt_len, output_len = (sum(lengths) / num_requests for lengths in zip(*plan.lengths, strict=True))
    what = (
        "requests of a constant length, a queue without end" if plan.lengths_are_means else f"{num_requests:,} requests"
    )
    rows = [("requests", f"{what}: {prompt_len:,.0f} tokens in, {output_len:,.0f} out on average")]
    rows.append(("sequences at the mean", _at_mean(plan, round(prompt_len + output_len))))
    waiting = (
        "nobody waits" if plan.mean_running_waiting is None else f"{plan.mean_running_waiting:,.1f} while some wait"
    )
    rows.append(("running rows", waiting if plan.replay is None else f"{plan.mean_running:,.1f} on average, {waiting}"))
    if plan.replay is not None:
        rows.append(("steps", f"{plan.replay.num_steps:,}, with {plan.replay.num_preemptions:,} preemptions"))
    rows.append(("slots with a token", f"{plan.live_share:.1%}; contiguous at most {plan.contiguous_share:.1%}"))
    return rows


def _at_mean(plan: CapacityPlan, num_tokens: int) -> str:
    at_once = plan.concurrency(num_tokens)
    ratio = at_once.raw / plan.contiguous_sequences if plan.contiguous_sequences else float("inf")
    return f"{at_once.usable:,} of {num_tokens:,} tokens ({at_once.raw:,} raw, {ratio:.1f}x contiguous)"


def _block_size_lines(plan: CapacityPlan) -> list[str]:
    what = "the requests" if plan.lengths is not None else f"{plan.max_model_len:,} tokens"
    lines = [f"block size   blocks a sequence   worst waste   slots with a token   table entries   ({what})"]
    for cost in plan.block_size_costs():
        lines.append(
            f"{cost.block_size:>10}   {cost.num_blocks:>17,.1f}   {cost.worst_waste:>11}   {cost.utilization:>18.1%}   "
            f"{cost.table_length:>13,}"
        )
    return lines
