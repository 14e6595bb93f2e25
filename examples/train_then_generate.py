"""Train, save, load, generate, with one module all the way: `python examples/train_then_generate.py`

A small decoder learns the bytes of a text (by default this project's own documentation), is saved with Orbax, loaded
into the engine as any checkpoint is, and goes on with prompts from that text.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from pagedjax import LLM, Decoder, ModelConfig, SamplingParams
from pagedjax.loaders import orbax

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ModelConfig(
    family="llama",
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
MAX_MODEL_LEN = 256  # of the engine


class ByteTokenizer:
    """Token i is byte i."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


def read_text(path: pathlib.Path | None) -> str:
    """The given file, or the project's own pages."""
    if path is not None:
        return path.read_text()
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(page.read_text() for page in pages if page.exists())


def check(options: argparse.Namespace) -> None:
    """A ValueError or an OSError for what would else be found after the training."""
    if min(options.steps, options.batch, options.length) < 1:
        raise ValueError("--steps, --batch and --length are at least 1")
    for prompt in options.prompts:
        if not 0 < len(prompt.encode()) < MAX_MODEL_LEN:
            raise ValueError(f"--prompts: {prompt!r} has {len(prompt.encode())} bytes, not 1 to {MAX_MODEL_LEN - 1}")
    options.out.mkdir(parents=True, exist_ok=True)
    if not orbax.is_checkpoint(options.out):
        orbax.check_destination(options.out)


def train(text: str, options: argparse.Namespace) -> Any:
    """The parameters after `options.steps` steps on random windows of the text."""
    data = np.frombuffer(text.encode(), np.uint8)
    if len(data) <= options.length:
        raise ValueError(f"the text has {len(data)} bytes, and a window is {options.length + 1}; give a longer text")
    graphdef, params = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(options.seed)))
    warmup = min(20, options.steps // 2)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, options.rate, warmup, options.steps))
    state, rng = optimizer.init(params), np.random.default_rng(options.seed)

    @jax.jit
    def step(params: Any, state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(graphdef, params)(windows[:, :-1])
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]))

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    with tqdm(range(options.steps), desc="training", unit="step") as bar:
        for _ in bar:
            starts = rng.integers(0, len(data) - options.length, (options.batch, 1))
            windows = data[starts + np.arange(options.length + 1)].astype(np.int32)
            params, state, value = step(params, state, windows)
            bar.set_postfix(loss=f"{float(value):.3f}", refresh=False)
    print(f"loss {float(value):.3f} nats a byte (a guess among 256 is {np.log(256):.3f})", file=sys.stderr)
    return params


def run(options: argparse.Namespace) -> None:
    """Trains, saves, loads, prints what the model makes of the prompts."""
    check(options)
    asked = SamplingParams(temperature=0.5, max_tokens=120, seed=options.seed)
    params = train(read_text(options.text), options)
    if orbax.is_checkpoint(options.out):
        shutil.rmtree(options.out)  # one of an earlier run
    orbax.save(options.out, CONFIG, nnx.to_pure_dict(params))
    llm = LLM.load(options.out, tokenizer=ByteTokenizer(), max_model_len=MAX_MODEL_LEN, max_num_seqs=8)
    for output in llm.generate(options.prompts, asked):
        print(f"> {output.prompt}{output.outputs[0].text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=pathlib.Path, default=None, help="a file to learn; default: these docs")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("trained"), help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--length", type=int, default=128, help="bytes a window")
    parser.add_argument("--rate", type=float, default=3e-3, help="of the optimiser, at its highest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", nargs="*", default=["The KV pool is ", "A block ", "import "])
    options = parser.parse_args()
    try:
        run(options)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
