"""The decoder-only transformer: one Flax NNX class, families as configuration, one parameter layout for all of them.

`Decoder.__call__` is the dense causal forward for training; `Decoder.paged` is the forward of the engine, which reads
and writes a KV pool. They share every layer and differ only in the function that attends. Layers are stacked along a
leading axis and scanned, so compile time does not grow with depth.

Dimensions: B batch, T tokens, E hidden size, V vocabulary, L layers, Hq query heads, Hkv KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax import attention, rope
from pagedjax.attention import Attend
from pagedjax.batch import Batch
from pagedjax.config import ModelConfig
from pagedjax.layer_matrices import Linear, ScannedLayers, whole
from pallas_kernels import KVPages

Params = Any  # an nnx.State or a nested dict of arrays, as `Decoder` names them

# float32 products are float32: the default on a TPU is a single bfloat16 pass.
_PRECISION = jax.lax.Precision.HIGHEST


def _linear(features_in: int, features_out: int, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> Linear:
    return Linear(features_in, features_out, use_bias=bias, param_dtype=dtype, precision=_PRECISION, rngs=rngs)


def _norm(features: int, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(features, epsilon=config.rms_norm_eps, param_dtype=dtype, rngs=rngs)


class Attention(nnx.Module):
    """Projections, rotation and head norms around an attend function."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = _linear(config.hidden_size, q_size + 2 * kv_size, config.qkv_bias, dtype, rngs)
        self.out = _linear(q_size, config.hidden_size, config.out_bias, dtype, rngs)
        if config.qk_norm:
            self.q_norm = _norm(config.head_dim, config, dtype, rngs)
            self.k_norm = _norm(config.head_dim, config, dtype, rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend, cache: Any) -> tuple[jax.Array, Any]:
        config = self.config
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # Cut before it is reshaped to heads: the other way round XLA for TPU relays the weights of all layers, a copy.
        parts = jnp.split(self.qkv(x), [q_size, q_size + kv_size], axis=-1)
        q, k, v = (part.reshape(*x.shape[:-1], -1, config.head_dim) for part in parts)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        frequencies, scaling = rope.frequencies(config.rope, config.head_dim, config.max_position_embeddings)
        q = rope.rotate(q, positions, frequencies, scaling)
        k = rope.rotate(k, positions, frequencies, scaling)
        out, cache = attend(q, k, v, cache)
        return self.out(out.reshape(*x.shape[:-1], -1)), cache


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202) with gate and up in one matrix."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.gate_up = _linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, dtype, rngs)
        self.down = _linear(config.intermediate_size, config.hidden_size, config.mlp_bias, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class DecoderLayer(nnx.Module):
    """A pre-norm block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config.hidden_size, config, dtype, rngs)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = _norm(config.hidden_size, config, dtype, rngs)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend, cache: Any) -> tuple[jax.Array, Any]:
        out, cache = self.attention(self.attention_norm(x), positions, attend, cache)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """A causal language model.

    Args:
        config: the architecture.
        dtype: of the parameters; activations follow it.
        rngs: initialises the parameters. `abstract` makes a decoder without any.
    """

    def __init__(self, config: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(dtype)
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, param_dtype=dtype, rngs=rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, dtype=dtype, rngs=rngs)

        self.layers = stack(rngs)
        self.final_norm = _norm(config.hidden_size, config, dtype, rngs)
        if not config.tie_word_embeddings:
            self.lm_head = _linear(config.hidden_size, config.vocab_size, False, dtype, rngs)

    @classmethod
    def abstract(cls, config: ModelConfig, dtype: Any = jnp.float32) -> Decoder:
        """A decoder whose parameters are shapes only: its graph for `nnx.split`, and the tree a loader must fill."""
        return nnx.eval_shape(lambda: cls(config, dtype=dtype, rngs=nnx.Rngs(0)))

    @staticmethod
    def engine_params(params: nnx.State) -> nnx.State:
        """Parameters as the engine's programs take them: the same arrays, on a CPU with marks (`layer_matrices`)."""
        return nnx.State({**params, "layers": whole(params["layers"])})

    def __call__(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """The dense causal forward.

        Args:
            tokens: i32[B, T]. Sequences padded on the right need no mask: causality hides the padding.
            positions: i32[B, T], or None for 0 .. T-1.

        Returns:
            float32 logits [B, T, V].
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

        def attend(layer: jax.Array, window: jax.Array | None) -> Attend:
            return attention.dense(positions, window)

        hidden, _ = self._run(tokens, positions, attend, None)
        return self.logits(hidden)

    def paged(
        self, tokens: jax.Array, kv_pages: KVPages, batch: Batch, *, implementation: str | None = None
    ) -> tuple[jax.Array, KVPages]:
        """The forward over a KV pool, for the packed tokens of many sequences.

        Args:
            tokens: i32[T].
            kv_pages: the pool of all layers; donate it to the enclosing jit and it is updated in place.
            batch: where each token goes and what it sees.
            implementation: of `pallas_kernels.paged_attention`.

        Returns:
            Hidden states [T, E] for `logits`, and the pool with K and V of these tokens written.
        """

        def attend(layer: jax.Array, window: jax.Array | None) -> Attend:
            return attention.paged(batch, layer, window, implementation)

        return self._run(tokens, batch.positions, attend, kv_pages, batch.num_tokens)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., V] of hidden states [..., E]."""
        if self.config.tie_word_embeddings:
            product, head = "...e,ve->...v", self.embed.embedding[...]
        else:
            product, head = "...e,ev->...v", self.lm_head.kernel[...]
        # XLA for CPU multiplies a single row by loops, which take ten times as long in bfloat16 as two rows do.
        is_alone = hidden.dtype == jnp.bfloat16 and hidden.ndim > 1 and hidden.size == hidden.shape[-1]
        rows = jnp.repeat(hidden, 2, axis=-2) if is_alone else hidden
        logits = jnp.einsum(product, rows, head, precision=_PRECISION, preferred_element_type=jnp.float32)
        return logits[..., :1, :] if is_alone else logits

    def _run(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Callable[[jax.Array, jax.Array | None], Attend],
        cache: Any,
        num_tokens: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Hidden states of all tokens, of which the first `num_tokens` count (None: all), and the cache."""
        graphdef, stacked = nnx.split(self.layers)
        parts = ScannedLayers(stacked, num_tokens)
        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        windows = self._windows()

        def body(carry: tuple[jax.Array, Any], xs: tuple[Any, ...]) -> tuple[tuple[jax.Array, Any], None]:
            x, cache = carry
            slices, layer, window = xs
            params = parts.layer(layer, slices)
            return nnx.merge(graphdef, params)(x, positions, attend(layer, window), cache), None

        (x, cache), _ = jax.lax.scan(body, (self.embed(tokens), cache), (parts.scanned, layers, windows))
        return self.final_norm(x), cache

    def _windows(self) -> np.ndarray | None:
        """i32[L] windows to scan over, or None where no layer has one."""
        windows = self.config.sliding_windows
        if windows is None or all(window is None for window in windows):
            return None
        return np.array([attention.FULL_ATTENTION if w is None else w for w in windows], np.int32)
