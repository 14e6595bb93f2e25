"""PagedAttention for JAX: a functional block table, and an engine that generates with your own params."""

from pagedjax import block_table, capacity
from pagedjax._version import __version__
from pagedjax.beam_search import BeamSearchParams
from pagedjax.config import ModelConfig, RopeConfig
from pagedjax.decoder import Decoder
from pagedjax.llm import LLM
from pagedjax.outputs import CompletionOutput, RequestOutput, Score
from pagedjax.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Decoder",
    "ModelConfig",
    "RequestOutput",
    "RopeConfig",
    "SamplingParams",
    "Score",
    "__version__",
    "block_table",
    "capacity",
]
