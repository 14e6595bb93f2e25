"""A model that is not ours, made to generate over paged KV: `python examples/own_model.py`.

`GPT` is an ordinary Flax model with learned positions, LayerNorm and its own attention, as one finds them. `PagedGPT`
below is all that it takes to run it in the engine: its attention writes K and V into the pool and reads them there. The
script generates with both, and compares the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax import LLM, ModelConfig, SamplingParams
from pagedjax.batch import Batch
from pallas_kernels import KVPages, paged_attention, write_kv

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q, k, v [..., T, heads, D] -> [..., T, heads, D]

VOCAB, WIDTH, HEADS, LAYERS, MAX_LEN = 256, 64, 4, 3, 128


class Block(nnx.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, attend: Attend) -> jax.Array:
        parts = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:-1], HEADS, WIDTH // HEADS) for part in parts)
        x = x + self.out(attend(q, k, v).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """What its author wrote, for training."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens, self.places = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Embed(MAX_LEN, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """i32[B, T] -> logits [B, T, V]."""
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
        return self.tokens.attend(self.norm(x))


class PagedGPT(GPT):
    """What the engine needs: sizes, a forward over the pool, and logits."""

    config = ModelConfig(
        family="gpt",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_layers=LAYERS,
        num_q_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=MAX_LEN,
    )

    def paged(
        self, tokens: jax.Array, kv_pages: KVPages, batch: Batch, *, implementation: Any = None
    ) -> tuple[jax.Array, KVPages]:
        """i32[T] packed tokens of many sequences -> hidden states [T, E], and the pool with their K and V."""
        table = (batch.block_tables, batch.seq_lens, batch.query_start_loc)
        options = {"max_query_len": batch.max_query_len, "implementation": implementation}
        x = self.tokens(tokens) + self.places(batch.positions)
        for layer, block in enumerate(self.blocks):

            def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: int = layer) -> jax.Array:
                nonlocal kv_pages
                kv_pages = write_kv(kv_pages, layer, k, v, batch.slot_mapping)
                return paged_attention(q, kv_pages, *table, layer=layer, **options)

            x = block(x, attend)
        return self.norm(x), kv_pages

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., E] -> [..., V]."""
        return self.tokens.attend(hidden)


def generate_densely(model: GPT, prompt: list[int], num_tokens: int) -> list[int]:
    """One token after another, the whole sequence each time."""
    tokens, forward = list(prompt), nnx.jit(lambda model, tokens: model(tokens))
    for _ in range(num_tokens):
        padded = np.zeros((1, MAX_LEN), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(jnp.argmax(forward(model, padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


def main() -> None:
    model = PagedGPT(nnx.Rngs(0))
    llm = LLM(model, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=MAX_LEN, num_blocks=64)
    prompts = [list(range(1, 20)), [7, 7, 7], [100, 50]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))
    for prompt, output in zip(prompts, outputs, strict=True):
        dense = generate_densely(model, prompt, 12)
        print(f"{prompt[:4]}... -> {output.outputs[0].token_ids}")
        print(f"{'as without paging' if dense == output.outputs[0].token_ids else f'WITHOUT PAGING: {dense}'}\n")


if __name__ == "__main__":
    main()
