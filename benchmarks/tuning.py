"""Finds each variant's best options by trying all of a stated grid, so that none of them is compared at its worst."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import contiguous
import replay
import variants
from traces import Trace
from variants import Model, Variant

TOKEN_BUDGETS = (64, 128, 256, 512)  # max_num_batched_tokens
NUM_ROWS = (16, 32, 64)  # max_num_seqs of a paged engine; contiguous ones have as many as fit
WATERMARKS = (0.01, 0.05)


def grid(variant: Variant) -> Iterator[dict[str, Any]]:
    """The options to try."""
    if variant.decoder is contiguous.ContiguousDecoder:
        yield from ({"max_num_batched_tokens": budget} for budget in TOKEN_BUDGETS)
        return
    watermarks = WATERMARKS if variant.reserved_len is None else (0.0,)  # who reserves everything needs no margin
    for budget, num_rows, watermark in itertools.product(TOKEN_BUDGETS, NUM_ROWS, watermarks):
        if budget >= num_rows:
            yield {"max_num_batched_tokens": budget, "max_num_seqs": num_rows, "watermark": watermark}


def best(variant: Variant, model: Model, trace: Trace) -> tuple[Variant, list[dict[str, Any]]]:
    """Replays the trace once with all of the grid.

    Returns:
        The variant with the fastest options, its name marked; and each point's options with its seconds.
    """
    tried = []
    for options in grid(variant):
        candidate = variant.with_options(**options)
        (llm,) = variants.build([candidate], model)
        seconds = replay.timed(llm, candidate, trace).seconds
        tried.append({**options, "seconds": seconds})
        print(f"  {variant.name}: {seconds:.2f} s with {options}", flush=True)
    fastest = min(tried, key=lambda point: point["seconds"])
    chosen = {name: value for name, value in fastest.items() if name != "seconds"}
    return dataclasses.replace(variant.with_options(**chosen), name=f"{variant.name}, tuned"), tried
