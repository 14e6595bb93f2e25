"""What an engine needs on the device beside weights and K/V: asked of the compiler before anything is allocated.

The largest step is compiled against a pool that exists as shapes only. The temporaries of a `Decoder` do not depend on
the size of the pool, which is donated and updated in place; a model that makes XLA copy the pool needs an explicit
`num_blocks`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from pagedjax.config import ModelConfig
from pagedjax.engine_config import EngineConfig
from pagedjax.runner import lower_step
from pagedjax.step import EngineState
from pagedjax.tensor_parallel import tensor_parallel


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Bytes beside weights and K/V.

    Attributes:
        step_bytes: temporaries and results of the largest step, and the code of all programs.
        row_bytes: the rows' state: token histories, sampling parameters and block tables.
        table_bytes_per_block: what the block table has for each block of the pool.
    """

    step_bytes: int
    row_bytes: int
    table_bytes_per_block: int


def measure(
    graphdef: Any,
    params: Any,
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    kv_dtype: Any,
    num_vocab_tokens: int,
) -> Workspace:
    """Compiles the largest steps that the engine may run, and reads what they need.

    Args:
        graphdef: of the model, from `nnx.split`.
        params: the parameters, or their shapes.
        config: the engine's options.
        model_config: the sizes of the model.
        kv_dtype: of the pool.
        num_vocab_tokens: ids that can be drawn.
    """

    parallel = tensor_parallel(config.mesh, model_config)
    heads = None if parallel is None else parallel.heads

    def shapes(num_blocks: int) -> EngineState:
        make = functools.partial(EngineState.zeros, model_config, num_blocks=num_blocks, kv_dtype=kv_dtype, heads=heads)
        sizes = {name: getattr(config, name) for name in ("block_size", "max_num_seqs", "max_model_len")}
        return jax.eval_shape(lambda: make(**sizes))

    state = shapes(2)
    step_bytes = code_bytes = 0
    largest = [(config.token_ladder, 0), (config.verify_ladder, config.num_speculative_tokens)]
    for ladder, max_proposals in largest:
        if ladder:
            lowered = lower_step(
                graphdef,
                params,
                state,
                config,
                model_config,
                num_vocab_tokens=num_vocab_tokens,
                num_tokens=ladder[-1],
                max_proposals=max_proposals,
            )
            analysis: Any = lowered.compile().memory_analysis()
            results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            step_bytes = max(step_bytes, analysis.temp_size_in_bytes + max(results, 0))
            code_bytes = max(code_bytes, analysis.generated_code_size_in_bytes)
    num_programs = len(config.token_ladder) + len(config.verify_ladder)
    table_bytes_per_block = _beside_pool(shapes(3)) - _beside_pool(state)
    row_bytes = _beside_pool(state) - 2 * table_bytes_per_block
    return Workspace(step_bytes + code_bytes * num_programs, row_bytes, table_bytes_per_block)


def _beside_pool(state: EngineState) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.table, state.rows)))
