"""Attention on a paged KV cache: the pool, its transitions, and attention over it. Imports jax and numpy only;
numba once a program is traced for a CPU."""

from pallas_kernels._attention import paged_attention
from pallas_kernels._cascade import cascade_attention
from pallas_kernels._kv_pages import KVPages, copy_blocks, gather_kv
from pallas_kernels._kv_write import write_kv
from pallas_kernels._layer_matmul import layer_matmul
from pallas_kernels._merge import merge_attention_states

__all__ = [
    "KVPages",
    "cascade_attention",
    "copy_blocks",
    "gather_kv",
    "layer_matmul",
    "merge_attention_states",
    "paged_attention",
    "write_kv",
]
