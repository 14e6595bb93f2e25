"""PagedAttention for JAX: a functional block table, and an engine that generates with your own params.

What the names stand for is imported when it is first asked for, so that `pagedjax.capacity` starts at once and needs no
jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pagedjax._version import __version__

if TYPE_CHECKING:
    from pagedjax import block_table, capacity
    from pagedjax.beam_search import BeamSearchParams
    from pagedjax.config import ModelConfig, RopeConfig
    from pagedjax.decoder import Decoder
    from pagedjax.generation import Generated, generate
    from pagedjax.llm import LLM
    from pagedjax.outputs import CompletionOutput, RequestOutput, Score
    from pagedjax.parity import Parity, check_parity
    from pagedjax.rollout import Rollout, RolloutArrays
    from pagedjax.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Decoder",
    "Generated",
    "ModelConfig",
    "Parity",
    "RequestOutput",
    "Rollout",
    "RolloutArrays",
    "RopeConfig",
    "SamplingParams",
    "Score",
    "__version__",
    "block_table",
    "capacity",
    "check_parity",
    "generate",
]

_HOMES = {
    "LLM": "llm",
    "BeamSearchParams": "beam_search",
    "CompletionOutput": "outputs",
    "Decoder": "decoder",
    "Generated": "generation",
    "generate": "generation",
    "ModelConfig": "config",
    "Parity": "parity",
    "check_parity": "parity",
    "Rollout": "rollout",
    "RolloutArrays": "rollout",
    "RequestOutput": "outputs",
    "RopeConfig": "config",
    "SamplingParams": "sampling_params",
    "Score": "outputs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _HOMES:  # a module; importing it makes it an attribute
        return importlib.import_module(f"{__name__}.{name}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
