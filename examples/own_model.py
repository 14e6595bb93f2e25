"""A model that is not ours, made to generate over paged KV: `python examples/own_model.py`.

`GPT` is an ordinary Flax model with learned positions, LayerNorm and its own attention, as one finds them. `PagedBlock`
and `PagedGPT` are all that it takes to run it in the engine: the same parameters, and attention over the KV pool. The
script generates with them, and compares the log-probability of each token with what `GPT`'s own forward says.

Dimensions: B batch, T tokens, E width, V vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from pagedjax import LLM, ModelConfig, Parity, SamplingParams, attention, check_parity
from pagedjax.batch import Batch
from pallas_kernels import KVPages

VOCAB, WIDTH, HEADS, LAYERS, MAX_LEN = 256, 64, 4, 2, 128
ROUNDING = 1e-4  # of log-probabilities, at most


class Block(nnx.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, E] -> [B, T, E]."""
        parts = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:-1], HEADS, WIDTH // HEADS) for part in parts)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.reshape(x.shape))
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
            x = block(x)
        return self.tokens.attend(self.norm(x))


class PagedBlock(Block):
    """The same block, which is told how to attend."""

    def paged(self, x: jax.Array, attend: attention.Attend, kv_pages: KVPages) -> tuple[jax.Array, KVPages]:
        """[T, E] of many sequences -> [T, E], and the pool with their K and V."""
        parts = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:-1], HEADS, WIDTH // HEADS) for part in parts)
        out, kv_pages = attend(q, k, v, kv_pages)
        x = x + self.out(out.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)))), kv_pages


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

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.blocks: Any = nnx.List([PagedBlock(rngs) for _ in range(LAYERS)])

    def paged(
        self, tokens: jax.Array, kv_pages: KVPages, batch: Batch, *, implementation: str | None = None
    ) -> tuple[jax.Array, KVPages]:
        """i32[T] packed tokens of many sequences -> hidden states [T, E], and the pool with their K and V."""
        x = self.tokens(tokens) + self.places(batch.positions)
        for layer, block in enumerate(self.blocks):
            attend = attention.paged(batch, jnp.int32(layer), None, implementation)
            x, kv_pages = block.paged(x, attend, kv_pages)
        return self.norm(x), kv_pages

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., E] -> [..., V]."""
        return self.tokens.attend(hidden)


def run(mesh: Mesh | None = None) -> Parity:
    """Generates with the parameters of the model as found, prints the tokens, and compares."""
    params = nnx.state(GPT(nnx.Rngs(0)))
    model = nnx.eval_shape(lambda: PagedGPT(nnx.Rngs(0)))  # shapes alone
    prompts = [list(range(1, 20)), [7, 7, 7], [100, 50]]
    with jax.default_matmul_precision("highest"):  # what a TPU takes for float32 by itself is too coarse to compare
        llm = LLM(model, params, mesh=mesh, max_model_len=MAX_LEN, num_blocks=64, max_num_seqs=4)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, seed=0, logprobs=0))
        for prompt, output in zip(prompts, outputs, strict=True):
            print(f"{prompt[:4]}... -> {output.outputs[0].token_ids}")
        return check_parity(llm, params, outputs)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    parity = run()
    print(parity)
    if not parity.max_difference <= ROUNDING:  # nor is NaN
        sys.exit(f"error: with and without paging, log-probabilities differ by more than rounding ({ROUNDING:.0e})")


if __name__ == "__main__":
    main()
