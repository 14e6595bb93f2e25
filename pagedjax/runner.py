"""The device side of the engine: parameters, state and the closed set of compiled programs.

A plan goes in, a result comes out. Programs are compiled ahead of time for exact shapes, so nothing can recompile
behind one's back; which exist is known at the start, from the ladder of token counts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

import pallas_kernels
from pagedjax import block_table
from pagedjax.config import ModelConfig
from pagedjax.engine_config import EngineConfig
from pagedjax.plan import NO_TOKEN, Admission, StepPlan, StepResult
from pagedjax.request import Sequence
from pagedjax.row_sampling import row_values
from pagedjax.row_state import ADMITS, DROPS, Changes, RowState, change_rows
from pagedjax.step import NUM_COUNTS, DeviceResult, EngineState, step
from pagedjax.step_clock import StepClock
from pagedjax.tensor_parallel import TensorParallel, tensor_parallel
from pallas_kernels import KVPages

logger = logging.getLogger(__name__)


class Runner:
    """Runs plans.

    Args:
        graphdef: of the model, from `nnx.split`.
        params: the model's parameters, an nnx.State of arrays on the device.
        config: the engine's options.
        model_config: the sizes of the model.
        num_blocks: blocks of the pool, the null block included.
        kv_dtype: of the pool.
        num_vocab_tokens: ids that can be drawn; those above are padding of the vocabulary.
        engine_params: the parameters as the programs take them, the same memory held otherwise; None: as they are.
    """

    def __init__(
        self,
        graphdef: Any,
        params: Any,
        config: EngineConfig,
        model_config: ModelConfig,
        *,
        num_blocks: int,
        kv_dtype: Any,
        num_vocab_tokens: int,
        engine_params: Callable[[Any], Any] | None = None,
    ) -> None:
        self._engine_params = engine_params or (lambda params: params)
        self.graphdef, self.params, self.config = graphdef, params, config
        self._model_config, self._num_vocab_tokens = model_config, num_vocab_tokens
        self._num_blocks, self._kv_dtype = num_blocks, kv_dtype
        self._parallel = tensor_parallel(config.mesh, model_config)
        self._programs: dict[str, Callable[..., Any]] = {}
        self._warm = False
        self.on_compile: Callable[[str], None] = lambda name: None  # told each program before it is compiled
        self.compiling: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # around it all
        self.compile_seconds = 0.0
        self.clock = StepClock()
        self.state = self._fresh_state()

    @property
    def program_names(self) -> tuple[str, ...]:
        """Every program there can be."""
        steps = (f"step[{size}]" for size in self.config.token_ladder)
        return ("rows", "defragment", *steps, *(f"verify[{size}]" for size in self.config.verify_ladder))

    @property
    def compiled(self) -> tuple[str, ...]:
        """Names of the programs compiled so far."""
        return tuple(self._programs)

    def warmup(self, on_compiled: Callable[[str], None] = lambda name: None) -> None:
        """Compiles every program, as many at a time as there are cores; afterwards `strict_compile` holds.

        Args:
            on_compiled: told each program that is ready.
        """
        start = time.perf_counter()
        with self.compiling(), concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            compiling = {}
            for name in self.program_names:
                if name in self._programs:
                    on_compiled(name)
                else:  # lowered here: what is set for this thread, such as the default device, is not for others
                    compiling[threads.submit(self._lower(name).compile)] = name
            for done in concurrent.futures.as_completed(compiling):
                self._programs[compiling[done]] = done.result()
                on_compiled(compiling[done])
        if compiling:
            self.compile_seconds += time.perf_counter() - start
        self._warm = True

    def reset(self) -> None:
        """Throws the device's state away, whatever has become of it, and makes a fresh one."""
        self.clock.reset()
        for leaf in jax.tree.leaves(self.state):
            if not leaf.is_deleted():
                leaf.delete()
        self.state = self._fresh_state()

    @property
    def params(self) -> Any:
        """The parameters in use."""
        return self._params

    @params.setter
    def params(self, params: Any) -> None:
        self._program_params = self._engine_params(params)  # first, as it may raise
        self._params, self._param_leaves = params, jax.tree.leaves(params)  # the leaves are looked at in every step

    def check_params(self) -> None:
        """Raises ValueError if they are gone, as those are that a train step has had donated."""
        if any(leaf.is_deleted() for leaf in self._param_leaves):
            raise ValueError(
                "the parameters were donated or deleted; call update_params with live ones (running='recompute' or "
                "'keep': the unfinished requests are still there)"
            )

    def change_rows(self, plan: StepPlan) -> None:
        """Applies the plan's releases, drops and admissions."""
        for changes in self._changes(plan):
            table, rows = self._program("rows")(self.state.table, self.state.rows, changes)
            self.state = EngineState(self.state.kv_pages, table, rows)

    def defragment(self) -> dict[int, int]:
        """Moves the used blocks to the front of the pool; from which id to which."""
        table, kv_pages, copies = self._program("defragment")(self.state.table, self.state.kv_pages)
        self.state = EngineState(kv_pages, table, self.state.rows)
        src, dst, count = jax.device_get((copies.src, copies.dst, copies.count))
        return dict(zip(src[:count].tolist(), dst[:count].tolist(), strict=True))

    def kv_of(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V of a row's tokens, [L, tokens, H, D] each; zero where a sliding window has passed."""
        table = self.state.table
        seq_lens, block_tables = jax.device_get((table.seq_lens, table.block_tables))  # on whatever mesh they lie
        num_tokens, ids = int(seq_lens[row]), block_tables[row]
        ids = np.where(ids == block_table.NULL_BLOCK, table.num_blocks, ids)  # no block: read as zeros
        gather: Callable[..., Any] = pallas_kernels.gather_kv
        if self._parallel is not None:
            gather = self._parallel.heads.gather
        layers = [
            jax.device_get(gather(self.state.kv_pages, layer, ids, num_tokens))
            for layer in range(self._model_config.num_layers)
        ]
        k, v = (np.stack(parts)[:, :num_tokens] for parts in zip(*layers, strict=True))
        return k, v

    def run(self, plan: StepPlan) -> StepResult:
        """Applies a plan and waits for its result."""
        return self.start(plan)()

    def start(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Applies a plan; what it returns waits for the result. Several may be on their way, to be taken in order."""
        self.change_rows(plan)
        kind, ladder = "step", self.config.token_ladder
        if plan.num_proposals:
            kind, ladder = "verify", self.config.verify_ladder
        program = self._program(f"{kind}[{next(size for size in ladder if size >= plan.total_new_tokens)}]")
        counts = [plan.num_new_tokens, np.int32(plan.num_steps)]
        if plan.num_proposals:
            counts.append(np.int32(plan.num_proposals))
        self.state, result = program(self._program_params, self.state, *counts)
        self.clock.started()
        return functools.partial(self._fetch, plan, result)

    def _fetch(self, plan: StepPlan, result: DeviceResult) -> StepResult:
        num_steps, num_rows = self.config.decode_steps, self.config.max_num_seqs
        num_lines = num_steps * (1 + self.config.num_speculative_tokens if plan.num_proposals else 1)
        used = slice(None if plan.num_proposals else plan.num_steps)
        tokens, finish, seq_lens, counts, filled = np.split(
            np.asarray(result.packed), np.cumsum([num_lines * num_rows, num_lines * num_rows, num_rows, NUM_COUNTS])
        )
        self.clock.fetched()
        asking = [sequence for sequence in plan.parts.sequences if sequence.wants_logprobs]
        params = [sequence.params for sequence in asking]
        wanted = any(p.logprobs is not None for p in params)
        prompt_wanted = any(sequence.next_score is not None for sequence in asking)
        return StepResult(
            tokens=tokens.reshape(num_lines, num_rows)[used],
            finish=finish.reshape(num_lines, num_rows)[used],
            seq_lens=seq_lens,
            num_free_blocks=int(counts[0]),
            filled=filled[: counts[2]],
            ok=bool(counts[1]),
            num_proposed_tokens=int(counts[3]),
            num_accepted_tokens=_num_accepted(tokens.reshape(num_steps, -1, num_rows)),
            logprobs=jax.device_get(result.sampled) if wanted else None,
            drawn=jax.device_get(result.drawn) if any(p.sampled_logprobs for p in params) else None,
            prompt_logprobs=jax.device_get(result.prompt) if prompt_wanted else None,
        )

    def _changes(self, plan: StepPlan) -> list[Changes]:
        """The plan's changes of rows, ADMITS and DROPS at a time; the first call does all releases and forks, of which
        each reads the table as it was before any."""
        num_calls = max(-(-len(plan.admits) // ADMITS), -(-len(plan.drops) // DROPS), bool(plan.releases))
        calls = [Changes.none(self.state.rows, self.config.max_blocks_per_seq) for _ in range(num_calls)]
        for index, changes in enumerate(calls):
            drops = plan.drops[index * DROPS : (index + 1) * DROPS]
            changes.drops[: len(drops)] = drops
            for place, admission in enumerate(plan.admits[index * ADMITS : (index + 1) * ADMITS]):
                self._start(changes, place, admission)
        if calls:
            calls[0].release[plan.releases] = True
        for admission in plan.admits:
            if admission.parent is not None:
                calls[0].parents[admission.sequence.row] = admission.parent
                calls[0].ends[admission.sequence.row] = admission.num_tokens
        return calls

    def _start(self, changes: Changes, place: int, admission: Admission) -> None:
        assert admission.sequence.row is not None
        changes.rows[place] = admission.sequence.row
        if admission.parent is None:
            changes.adopts[place] = True
            changes.num_tokens[place] = admission.num_tokens
            changes.block_ids[place, : len(admission.block_ids)] = admission.block_ids
        line = self.line(admission.sequence)
        jax.tree.map(lambda leaves, leaf: leaves.__setitem__(place, leaf), changes.lines, line)

    def line(self, sequence: Sequence) -> RowState:
        """A row's line for a sequence, as host arrays."""
        request = sequence.request
        tokens = np.zeros(self.config.max_model_len, np.int32)
        given = sequence.given_ids  # the last of a continuation is read as a target, and then drawn over
        tokens[: len(given) + len(sequence.output_ids)] = given + sequence.output_ids
        line: dict[str, Any] = {
            "tokens": tokens,
            "num_tokens": np.int32(sequence.num_tokens),
            "prompt_len": np.int32(len(given)),
            "end_len": np.int32(sequence.end_len),
            "prompt_logprobs_from": np.int32(sequence.next_score or len(given)),
            "active": np.bool_(True),
            "sampling": row_values(
                request.params, seed=sequence.seed, sample_index=sequence.index, stop_ids=sorted(sequence.stop_ids)
            ),
        }
        return RowState(**line)

    def _fresh_state(self) -> EngineState:
        # In one program: it is compiled faster than its parts, and gives every leaf, which is donated, its own buffer.
        return jax.jit(self._zero_state)() if self._parallel is None else self._parallel.make(self._zero_state)

    def _zero_state(self) -> EngineState:
        config = self.config
        return EngineState.zeros(
            self._model_config,
            num_blocks=self._num_blocks,
            block_size=config.block_size,
            kv_dtype=self._kv_dtype,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            heads=None if self._parallel is None else self._parallel.heads,
        )

    def _program(self, name: str) -> Callable[..., Any]:
        if name not in self._programs:
            if self._warm and self.config.strict_compile:
                raise RuntimeError(f"program {name} is not compiled, and strict_compile is on; llm.plan lists the set")
            self.on_compile(name)
            start = time.perf_counter()
            with self.compiling():
                self._programs[name] = self._lower(name).compile()
            seconds = time.perf_counter() - start
            self.compile_seconds += seconds
            logger.info("compiled %s in %.1f s", name, seconds)
        return self._programs[name]

    def _lower(self, name: str) -> jax.stages.Lowered:
        state = self.state
        if name == "rows":
            changes = Changes.none(state.rows, self.config.max_blocks_per_seq)
            return _lower(self._parallel, change_rows, (state.table, state.rows, changes), (0, 1))
        if name == "defragment":
            return _lower(self._parallel, _defragment, (state.table, state.kv_pages), (0, 1), num_results=1)
        kind, size = name.removesuffix("]").split("[")
        return lower_step(
            self.graphdef,
            self._program_params,
            self.state,
            self.config,
            self._model_config,
            num_vocab_tokens=self._num_vocab_tokens,
            num_tokens=int(size),
            max_proposals=self.config.num_speculative_tokens if kind == "verify" else 0,
        )


def lower_step(
    graphdef: Any,
    params: Any,
    state: EngineState,
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    num_vocab_tokens: int,
    num_tokens: int,
    max_proposals: int,
) -> jax.stages.Lowered:
    """The program of a step, to be compiled, on the mesh if there is one; `params` and `state` may be shapes.

    Args:
        graphdef, params, state, config, model_config, num_vocab_tokens: as the runner has them.
        num_tokens: token places.
        max_proposals: proposals of a row; 0 for a step that verifies none.
    """

    parallel = tensor_parallel(config.mesh, model_config)

    def run(params: Any, state: EngineState, *counts: jax.Array) -> Any:
        model = nnx.merge(graphdef, params)
        return step(
            model if parallel is None else parallel.on_mesh(model),
            state,
            *counts,
            num_tokens=num_tokens,
            max_steps=config.decode_steps,
            max_proposals=max_proposals,
            num_vocab_tokens=num_vocab_tokens,
            implementation=config.attention,
            retain_filled=config.enable_prefix_caching,
            window=model_config.largest_window,
            batch_invariant=config.batch_invariant,
        )

    counts = [np.zeros(config.max_num_seqs, np.int32), *[np.int32(1)] * (2 if max_proposals else 1)]
    return _lower(parallel, run, (params, state, *counts), (1,), num_results=1)


def _lower(
    parallel: TensorParallel | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    donated: tuple[int, ...],
    num_results: int = 0,
) -> jax.stages.Lowered:
    if parallel is None:
        return jax.jit(function, donate_argnums=donated).lower(*arguments)
    return parallel.lower(function, arguments, donated, num_results)


def _num_accepted(tokens: np.ndarray) -> int:
    """How many of the tokens i32[K, 1 + k, R] came beyond the first of an inner step."""
    return int(np.count_nonzero(tokens[:, 1:] != NO_TOKEN))


def _defragment(
    table: block_table.BlockTable, kv_pages: KVPages
) -> tuple[block_table.BlockTable, KVPages, block_table.BlockCopies]:
    table, copies = block_table.defragment(table)
    return table, pallas_kernels.copy_blocks(kv_pages, copies.src, copies.dst, copies.count), copies
