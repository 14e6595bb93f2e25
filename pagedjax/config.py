"""What a model is: the architecture as data, one frozen and hashable value per checkpoint.

Families differ by configuration only; every loader produces a `ModelConfig`, and the decoder reads nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base frequency and how it is stretched for long contexts.

    The fields after `factor` belong to one kind each; `pagedjax.rope` documents the formulas and their sources.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int | None = None  # dynamic, yarn, llama3: the context length of pre-training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scales cos and sin; None takes the paper's 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whether the correction range is rounded to whole dimensions

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise ValueError(f"unknown rope kind {self.kind!r}; supported: {', '.join(get_args(RopeKind))}")
        if not self.theta > 1.0 or not self.factor > 0.0:
            raise ValueError(f"rope theta ({self.theta}) must be over 1 and its factor ({self.factor}) over 0")
        if self.kind in ("dynamic", "yarn", "llama3") and not (self.original_max_position or 0) > 0:
            raise ValueError(
                f"rope kind {self.kind!r} needs original_max_position, the context length of pre-training; "
                f"got {self.original_max_position}"
            )
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"llama3 rope blends between low_freq_factor ({self.low_freq_factor}) and high_freq_factor "
                f"({self.high_freq_factor}); the first must be the smaller"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: sizes, and which parts a family has.

    `sliding_windows` holds one entry a layer: a window in tokens (query i sees keys i-W+1 .. i), or None for full
    attention. `vocab_size` is the number of embedding rows; `num_tokens` (at most that) is how many of them are real
    tokens: the rest is padding and is never sampled.
    """

    family: str  # the checkpoint's model_type: "llama", "mistral", "qwen2", "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    out_bias: bool = False  # the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each q and k head before the rotation
    tie_word_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] | None = None  # None: full attention everywhere
    num_tokens: int | None = None  # None: vocab_size

    @property
    def largest_window(self) -> int | None:
        """The most keys any layer looks back on, the query's own among them; None where a layer sees everything."""
        windows = self.sliding_windows or (None,)
        known = [window for window in windows if window is not None]
        return max(known) if len(known) == len(windows) else None

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads ({self.num_q_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads}); "
                "grouped-query attention needs whole groups"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) is odd; the rotary embedding rotates pairs of dimensions")
        if self.sliding_windows is not None and len(self.sliding_windows) != self.num_layers:
            raise ValueError(
                f"sliding_windows has {len(self.sliding_windows)} entries for num_layers={self.num_layers}; "
                "give one a layer, None where attention is full"
            )
        if self.num_tokens is not None and not 0 < self.num_tokens <= self.vocab_size:
            raise ValueError(f"num_tokens ({self.num_tokens}) is not between 1 and vocab_size ({self.vocab_size})")
