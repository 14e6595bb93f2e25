"""What a model weighs and what its K/V takes: the few sizes that capacity depends on.

A block holds K and V of B tokens in all layers, and in a quantised pool a float32 scale for each token, head and part.
The layout, and what a TPU's lanes pad, are those of `pallas_kernels.KVPages`.

L layers, H KV heads, D head size, B block_size, b bytes a value.
"""

from __future__ import annotations

import dataclasses

from pagedjax.engine_config import KV_CACHE_DTYPES

LANES = 128
SCALE_BYTES = 4
QUANTISED = ("int8", "fp8")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
PARAM_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class KVShape:
    """A model as memory sees it; for models that this package can't read, or does not know.

    Attributes:
        num_layers: layers that keep K/V.
        num_kv_heads: KV heads a layer.
        head_dim: elements a head.
        params_bytes: bytes of all weights.
        num_q_heads: query heads a layer, where they matter: with tensor parallelism.
        dtype: of the weights, and of the K/V unless `kv_cache_dtype` says otherwise.
        window: the largest sliding window, where every layer has one; None: all K/V is kept.
        max_position_embeddings: most tokens a sequence may have.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    params_bytes: int = 0
    num_q_heads: int | None = None
    dtype: str = "bfloat16"
    window: int | None = None
    max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "num_q_heads", "window", "max_position_embeddings"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} is not a positive integer")
        if not isinstance(self.params_bytes, int) or self.params_bytes < 0:
            raise ValueError(f"params_bytes={self.params_bytes!r} is not a number of bytes")
        if self.dtype not in PARAM_DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {PARAM_DTYPES}")

    def stored_dtype(self, kv_cache_dtype: str) -> str:
        """What the pool stores for an engine option."""
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype={kv_cache_dtype!r} is not one of {KV_CACHE_DTYPES}")
        return self.dtype if kv_cache_dtype == "auto" else kv_cache_dtype

    def bytes_per_token(self, kv_cache_dtype: str = "auto") -> int:
        """2 L H D b, and the scales; without a TPU's padding."""
        dtype = self.stored_dtype(kv_cache_dtype)
        per_head = self.head_dim * DTYPE_BYTES[dtype] + (SCALE_BYTES if dtype in QUANTISED else 0)
        return 2 * self.num_layers * self.num_kv_heads * per_head

    def bytes_per_block(self, block_size: int, kv_cache_dtype: str = "auto", platform: str | None = None) -> int:
        """Bytes of a block in all layers, on a TPU with its padding."""
        dtype = self.stored_dtype(kv_cache_dtype)
        line, scales_line = 2 * self.head_dim, self.num_kv_heads * block_size
        if platform == "tpu":
            line, scales_line = _whole_lanes(line), _whole_lanes(scales_line)
        if self.head_dim % LANES == 0:
            line = 2 * self.head_dim  # K and V have lines of their own
        values = self.num_kv_heads * block_size * line * DTYPE_BYTES[dtype]
        scales = 2 * scales_line * SCALE_BYTES if dtype in QUANTISED else 0
        return self.num_layers * (values + scales)


def _whole_lanes(size: int) -> int:
    return -(-size // LANES) * LANES
