"""The ways to hold KV that are compared: paged, contiguous rows, and what lies between; one engine each, one model.

`paged`: blocks as they are needed. `oracle`: paged, but a request's final length, which it is told, is reserved when it
starts (the "Orca (Oracle)" of the vLLM paper, arXiv 2309.06180): nothing grows, nothing is preempted. `contiguous`:
rows of S_max slots, filled anew as soon as one is free. `static`: the same rows, but a batch of requests starts when
the last one has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import contiguous
import jax
import jax.numpy as jnp

from pagedjax import LLM, Decoder, ModelConfig, SamplingParams
from pagedjax.loaders import load_checkpoint, load_tokenizer
from pagedjax.request import Sequence

BLOCK_SIZE = 16
STEP_REPEATS = 5

Start = Literal["continuous", "static"]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Parameters that all engines share."""

    config: ModelConfig
    params: Any  # arrays on the device
    tokenizer: Any = None

    @classmethod
    def load(cls, source: str) -> Model:
        """In float32."""
        checkpoint = load_checkpoint(source, "float32")
        tokenizer, _ = load_tokenizer(checkpoint.source_path)
        return cls(checkpoint.config, jax.tree.map(jnp.asarray, checkpoint.params), tokenizer)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to hold KV in a number of slots.

    Attributes:
        name: for the table.
        num_slots: the memory that it has, in tokens.
        options: of the engine.
        decoder: which attention.
        reserved_len: tokens that a sequence has room set aside for when it starts; None: those that it knows.
        start: "static" starts a batch when the one before has ended.
    """

    name: str
    num_slots: int
    options: dict[str, Any]
    decoder: type[Decoder] = Decoder
    reserved_len: Callable[[Sequence], int] | None = None
    start: Start = "continuous"

    def with_options(self, **options: Any) -> Variant:
        return dataclasses.replace(self, options=self.options | options)

    def build(self, model: Model) -> LLM:
        """An engine; it has yet to compile."""
        dtype = jax.tree.leaves(model.params)[0].dtype
        return LLM(self.decoder.abstract(model.config, dtype), model.params, model.tokenizer, **self.options)

    @contextlib.contextmanager
    def rules(self, llm: LLM) -> Iterator[None]:
        """Within, the engine reserves what the variant says."""
        scheduler = llm._engine.scheduler
        if self.reserved_len is not None:
            scheduler.reserved_len = self.reserved_len  # type: ignore[method-assign]
            scheduler.owing = lambda: scheduler.running  # type: ignore[method-assign]
        try:
            yield
        finally:
            for name in ("reserved_len", "owing"):
                vars(scheduler).pop(name, None)  # the class's own again

    def num_allocated(self, sequence: Sequence, num_tokens: int, block_size: int) -> int:
        """Slots that nobody else can have while the sequence has K/V of `num_tokens`."""
        reserved = 0 if self.reserved_len is None else self.reserved_len(sequence)
        return math.ceil(max(num_tokens, reserved) / block_size) * block_size

    def least_steps(self, request_steps: int, block_steps: int) -> float:
        """Inner steps that it can't do without, whatever the order: given a trace's output tokens, which are rows times
        steps, and its blocks times steps."""
        if self.decoder is contiguous.ContiguousDecoder:
            return request_steps / self.options["max_num_seqs"]
        usable = self.options["num_blocks"] - 1
        return block_steps / (usable - math.ceil(self.options["watermark"] * usable))


def paged(num_slots: int, max_model_len: int, *, block_size: int = BLOCK_SIZE, **options: Any) -> Variant:
    """The null block is one of the pool's, so the slots to be used are a block fewer than the budget."""
    given = {
        "block_size": block_size,
        "num_blocks": num_slots // block_size,
        "max_model_len": max_model_len,
        "watermark": 0.01,
        "enable_prefix_caching": False,
    }
    return Variant("paged", num_slots, given | options)


def oracle(num_slots: int, max_model_len: int, **options: Any) -> Variant:
    base = paged(num_slots, max_model_len, **{"watermark": 0.0} | options)
    return dataclasses.replace(base, name="reserving the final length", reserved_len=final_len)


def contiguous_rows(num_slots: int, max_row_len: int, *, start: Start = "continuous", **options: Any) -> Variant:
    name = f"contiguous {max_row_len}" if start == "continuous" else f"static batch {max_row_len}"
    given = contiguous.options(num_slots, max_row_len) | options
    return Variant(name, num_slots, given, contiguous.ContiguousDecoder, start=start)


def build(lineup: Iterable[Variant], model: Model) -> list[LLM]:
    """An engine for each variant, compiled; those that differ only in what they reserve, or in when requests start,
    share one."""
    engines: dict[Any, LLM] = {}
    found = []
    for variant in lineup:
        key = (variant.decoder, tuple(sorted(variant.options.items())))
        if key not in engines:
            engines[key] = variant.build(model)
            engines[key].warmup()
        found.append(engines[key])
    return found


def final_len(sequence: Sequence) -> int:
    """The slots a sequence ends with: its last token is never computed."""
    return sequence.end_len - 1


def step_seconds(llm: LLM) -> dict[int, float]:
    """What a step of each number of places takes, full of one prompt: the median of a few."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    found = {}
    for size in llm.config.token_ladder:
        times = []
        for _ in range(STEP_REPEATS):
            start = time.perf_counter()
            llm.generate([[0] * min(size, llm.config.max_model_len - 1)], params, use_tqdm=False)
            times.append(time.perf_counter() - start)
        found[size] = statistics.median(times)
    return found
