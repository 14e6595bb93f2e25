"""Reinforcement learning in one process: a tiny decoder learns to sort digits. `python examples/rl_grpo.py`

A short supervised start teaches it what an answer looks like. Then every iteration samples a group of answers to each
of some random tasks with the engine, which uses the trainer's own parameters, rewards the right ones, and takes policy
gradient steps on the group's advantages (GRPO: Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300, with the clipped
ratio of PPO: Schulman et al. 2017, arXiv:1707.06347). No critic, no reference model.

Writes checkpoints, `rewards.csv` and, where matplotlib is there, `rewards.png` to --out; run it again to go on.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

from pagedjax import LLM, Decoder, ModelConfig, RolloutArrays, SamplingParams, check_parity

DIGITS, SORT, END, PAD, VOCAB = 10, 10, 11, 12, 16
NUM_DIGITS = 6
LENGTH = 2 * NUM_DIGITS + 2  # the task, SORT, the answer, END
CONFIG = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=192,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=32,
)
ANSWER = SamplingParams(temperature=1.0, max_tokens=NUM_DIGITS + 1, stop_token_ids=[END])


class Trainer(NamedTuple):
    """What a checkpoint holds."""

    params: Any
    optimizer: Any
    iteration: Any  # i32[]


# The task


def tasks(rng: np.random.Generator, count: int) -> np.ndarray:
    """i32[count, NUM_DIGITS + 1]: digits, and the token that asks for them in order."""
    digits = rng.integers(0, DIGITS, (count, NUM_DIGITS))
    return np.concatenate([digits, np.full((count, 1), SORT)], axis=1).astype(np.int32)


def rewards(arrays: RolloutArrays) -> np.ndarray:
    """f32[S]: 1 for a sample that is right to the end, else 0."""
    prompts, answers = arrays.tokens[:, :NUM_DIGITS], arrays.tokens[:, NUM_DIGITS + 1 :]
    right = np.concatenate([np.sort(prompts, axis=1), np.full((len(prompts), 1), END)], axis=1)
    return (answers == right).all(axis=1).astype(np.float32)


# Training


def make_steps(graphdef: Any, rate: float, clip: float) -> tuple[optax.GradientTransformation, Any, Any]:
    """The optimiser, and two jitted steps: supervised and by policy gradient."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def logprobs(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        own = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.pad(own, ((0, 0), (1, 0)))  # of each token, given those before it

    def imitate(params: Any, tokens: jax.Array) -> jax.Array:
        return -jnp.mean(logprobs(params, tokens)[:, NUM_DIGITS + 1 :])

    def improve(params: Any, batch: RolloutArrays, advantages: jax.Array) -> jax.Array:
        ratio = jnp.exp(logprobs(params, batch.tokens) - batch.logprobs)
        gain = jnp.minimum(ratio * advantages[:, None], jnp.clip(ratio, 1 - clip, 1 + clip) * advantages[:, None])
        return -jnp.sum(gain * batch.mask) / jnp.sum(batch.mask)

    def step(loss: Any) -> Any:
        def apply(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
            value, gradients = jax.value_and_grad(loss)(params, *batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        return jax.jit(apply)

    return optimizer, step(imitate), step(improve)


def advantages_of(values: np.ndarray, group: int) -> np.ndarray:
    """f32[S]: how much better than its group a sample is, in standard deviations."""
    grouped = values.reshape(-1, group)
    centred = grouped - grouped.mean(axis=1, keepdims=True)
    return (centred / (grouped.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


def supervised_start(trainer: Trainer, imitate: Any, rng: np.random.Generator, num_steps: int) -> Trainer:
    """Learns from right answers, for a while."""
    params, state = trainer.params, trainer.optimizer
    for _ in tqdm(range(num_steps), desc="supervised start", unit="step"):
        prompts = tasks(rng, 128)
        answers = np.sort(prompts[:, :NUM_DIGITS], axis=1)
        tokens = np.concatenate([prompts, answers, np.full((len(prompts), 1), END, np.int32)], axis=1)
        params, state, _ = imitate(params, state, tokens)
    return Trainer(params, state, trainer.iteration)


def train(options: argparse.Namespace) -> list[float]:
    """Runs, or goes on with, what `options` ask for; the mean reward of every iteration."""
    rng = np.random.default_rng(options.seed)
    graphdef, params = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(options.seed)))
    optimizer, imitate, improve = make_steps(graphdef, options.rate, options.clip)
    trainer = Trainer(params, optimizer.init(params), jnp.int32(0))
    table = options.out / "rewards.csv"
    with ocp.CheckpointManager(options.out.absolute() / "checkpoints") as checkpoints:
        if checkpoints.latest_step() is not None:
            trainer = checkpoints.restore(checkpoints.latest_step(), args=ocp.args.StandardRestore(trainer))
            curve = [float(row["reward"]) for row in csv.DictReader(table.open())][: int(trainer.iteration)]
            print(f"going on after iteration {int(trainer.iteration)}")
        else:
            trainer, curve = supervised_start(trainer, imitate, rng, options.start_steps), []
        num_rows = options.tasks * options.group
        llm = LLM(
            Decoder.abstract(CONFIG),
            params=trainer.params,
            max_model_len=LENGTH,
            block_size=4,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows,
            num_blocks=num_rows * 4 + 1,
            batch_invariant=True,  # one step program: of a model this small, empty places cost less than compiling more
            strict_compile=True,
        )
        llm.warmup()
        start, rollout_seconds = time.perf_counter(), 0.0
        with tqdm(total=options.iterations, initial=len(curve), desc="GRPO", unit="iteration") as bar:
            for iteration in range(len(curve), options.iterations):
                rng = np.random.default_rng([options.seed, iteration])
                began = time.perf_counter()
                prompts = tasks(rng, options.tasks).tolist()
                asked = [
                    SamplingParams(**vars_of(ANSWER), n=options.group, seed=int(rng.integers(2**31))) for _ in prompts
                ]
                arrays = llm.rollout(prompts, asked, use_tqdm=False).arrays(pad_to=LENGTH, pad_id=PAD)
                rollout_seconds += time.perf_counter() - began
                values = rewards(arrays)
                advantages, state, params = advantages_of(values, options.group), trainer.optimizer, trainer.params
                for _ in range(options.updates):
                    params, state, _ = improve(params, state, arrays, advantages)
                trainer = Trainer(params, state, jnp.int32(iteration + 1))
                llm.update_params(params)
                curve.append(float(values.mean()))
                bar.update()
                bar.set_postfix(reward=f"{np.mean(curve[-20:]):.3f}")
                if (iteration + 1) % options.save_every == 0 or iteration + 1 == options.iterations:
                    write_table(table, curve)
                    checkpoints.save(iteration + 1, args=ocp.args.StandardSave(trainer))
        seconds = time.perf_counter() - start
    text = [[*prompt, *np.sort(prompt[:-1]).tolist(), END] for prompt in tasks(rng, 20).tolist()]
    print(f"rollouts took {rollout_seconds / max(seconds, 1e-9):.0%} of {seconds:.0f} s")
    print(f"engine against trainer: {check_parity(llm, trainer.params, text)}")
    return curve


def vars_of(params: SamplingParams) -> dict[str, Any]:
    """What differs from prompt to prompt is left out."""
    return {"temperature": params.temperature, "max_tokens": params.max_tokens, "stop_token_ids": params.stop_token_ids}


# The curve


def write_table(path: pathlib.Path, curve: list[float]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["iteration", "reward"])
        writer.writerows(enumerate(curve))


def show(curve: list[float], out: pathlib.Path) -> None:
    """The curve as a table, and as a picture where matplotlib is there."""
    width = max(len(curve) // 10, 1)
    for first in range(0, len(curve), width):
        part = curve[first : first + width]
        mean = float(np.mean(part))
        print(f"iterations {first:4} to {first + len(part) - 1:4}  mean reward {mean:.3f}  {'#' * round(40 * mean)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(curve, linewidth=0.5, label="mean of an iteration")
    axes.plot(np.convolve(curve, np.ones(width) / width, "valid"), label=f"mean of {width}")
    axes.set(xlabel="iteration", ylabel="share of right answers", ylim=(0, 1), title="GRPO on sorting digits")
    axes.legend()
    figure.savefig(out / "rewards.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("grpo"), help="folder of checkpoints and curve"
    )
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--tasks", type=int, default=16, help="tasks an iteration")
    parser.add_argument("--group", type=int, default=16, help="samples of each task")
    parser.add_argument("--updates", type=int, default=2, help="gradient steps an iteration")
    parser.add_argument("--start-steps", type=int, default=300, help="steps of the supervised start")
    parser.add_argument("--rate", type=float, default=1e-3, help="of the optimiser")
    parser.add_argument("--clip", type=float, default=0.2, help="of the importance ratio")
    parser.add_argument("--save-every", type=int, default=50, help="iterations between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    show(train(options), options.out)


if __name__ == "__main__":
    main()
