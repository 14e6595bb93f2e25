"""Reinforcement learning in one process: a tiny decoder learns to sort digits. `python examples/rl_grpo.py`

A short supervised start shows it what an answer looks like. Then each step samples a group of answers to each of some
new tasks, with the engine on the trainer's own parameters; a rule rewards the right ones; and the trainer follows the
policy gradient. The objective is GRPO's (Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300, section 4.1, rewards of
whole answers) without the penalty on leaving a reference model: no critic, no second model.

All that runs in a step is compiled in the first. In --out are checkpoints, a table of the steps and, where matplotlib
is there, a picture of the rewards; --resume goes on from the last checkpoint, which is all that it reads.

Dimensions: S samples, a group of G to each task, groups one after another; L tokens of a task and its answer.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

from pagedjax import LLM, Decoder, ModelConfig, RolloutArrays, SamplingParams

NUM_DIGITS = 6
SORT, END, PAD = 10, 11, 12  # after the digits: asks for an answer, ends it, fills a line up
LENGTH = 2 * NUM_DIGITS + 2  # digits, SORT, sorted digits, END
CONFIG = ModelConfig(
    family="llama",
    vocab_size=16,
    hidden_size=64,
    intermediate_size=192,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=32,
)
CLIP = 0.2  # how far a token's probability may move before its gradient stops, as in PPO (arXiv:1707.06347)
TABLE, PICTURE, CHECKPOINTS = "rewards.csv", "rewards.png", "checkpoints"  # in --out
FREE_OPTIONS = ("out", "resume", "steps", "save_every")  # which may change from one part of a run to the next


class Trainer(NamedTuple):
    """What a step changes; a checkpoint holds it, the options and the records of the steps so far."""

    params: Any
    optimizer: Any


class Record(NamedTuple):
    """One step, as a line of the table."""

    step: int
    reward: float  # mean over the samples
    rollout_seconds: float
    train_seconds: float
    difference: float  # largest, of a token's log-probability in engine and trainer, before the update
    num_compiled: int  # programs


def tasks(rng: np.random.Generator, count: int) -> np.ndarray:
    """i32[count, NUM_DIGITS + 1]: random digits, and the token that asks for them in order."""
    digits = rng.integers(0, 10, (count, NUM_DIGITS))
    return np.concatenate([digits, np.full((count, 1), SORT)], axis=1).astype(np.int32)


def solved(prompts: np.ndarray) -> np.ndarray:
    """i32[count, LENGTH]: tasks with their right answers."""
    end = np.full((len(prompts), 1), END, np.int32)
    return np.concatenate([prompts, np.sort(prompts[:, :NUM_DIGITS], axis=1), end], axis=1)


def rewards(tokens: np.ndarray) -> np.ndarray:
    """i32[S, L] -> f32[S]: 1 for an answer that is right to its end, else 0: nothing for a part."""
    return (tokens == solved(tokens[:, : NUM_DIGITS + 1])).all(axis=1).astype(np.float32)


def advantages(values: np.ndarray, group: int) -> np.ndarray:
    """f32[S] -> f32[S]: by how many standard deviations a sample is better than its group."""
    grouped = values.reshape(-1, group)
    centred = grouped - grouped.mean(axis=1, keepdims=True)
    return (centred / (grouped.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


def logprobs(graphdef: Any, params: Any, tokens: Any, positions: Any) -> jax.Array:
    """i32[S, L], i32[S, L] -> f32[S, L], of each token given those before it; 0 for the first."""
    logits = nnx.merge(graphdef, params)(tokens[:, :-1], positions[:, :-1])
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(own, ((0, 0), (1, 0)))


def grpo_loss(graphdef: Any, params: Any, batch: RolloutArrays, advantage: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The objective, negated, and by how much the two log-probabilities of a token differ at most."""
    change = (logprobs(graphdef, params, batch.tokens, batch.positions) - batch.logprobs) * batch.mask  # [S, L]
    ratio, advantage = jnp.exp(change), advantage[:, None]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    of_sample = jnp.sum(gain * batch.mask, axis=1) / jnp.sum(batch.mask, axis=1)  # [S]
    return -jnp.mean(of_sample), jnp.max(jnp.abs(change))


def jitted_step(loss: Callable[..., tuple[jax.Array, jax.Array]], optimizer: optax.GradientTransformation) -> Any:
    """(trainer, *batch) -> (trainer, what `loss` says beside the loss)."""

    def step(trainer: Trainer, *batch: Any) -> tuple[Trainer, jax.Array]:
        gradients, aside = jax.grad(loss, has_aux=True)(trainer.params, *batch)
        changes, state = optimizer.update(gradients, trainer.optimizer, trainer.params)
        return Trainer(optax.apply_updates(trainer.params, changes), state), aside

    return jax.jit(step)


def supervised_start(graphdef: Any, params: Any, options: argparse.Namespace) -> Any:
    """The parameters after a few steps on right answers."""

    def loss(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        value = -jnp.mean(logprobs(graphdef, params, tokens, positions)[:, NUM_DIGITS + 1 :])
        return value, value

    optimizer, rng = optax.adam(options.start_rate), np.random.default_rng([options.seed, 0])
    step, trainer = jitted_step(loss, optimizer), Trainer(params, optimizer.init(params))
    for _ in tqdm(range(options.start_steps), desc="supervised start", unit="step"):
        trainer, _ = step(trainer, solved(tasks(rng, 128)))
    return trainer.params


class GRPO:
    """The loop: an engine and a train step on the same parameters."""

    def __init__(self, graphdef: Any, optimizer: optax.GradientTransformation, params: Any, options: Any) -> None:
        num_rows = options.tasks * options.group
        self.options, self.improve = options, jitted_step(functools.partial(grpo_loss, graphdef), optimizer)
        self.llm = LLM(
            Decoder.abstract(CONFIG),
            params=params,
            max_model_len=LENGTH,
            block_size=4,
            num_blocks=num_rows * -(-LENGTH // 4) + 1,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(num_rows, options.tasks * (NUM_DIGITS + 1)),
            batch_invariant=True,  # a run is repeated, or resumed, bit for bit; and there is one program to compile
            strict_compile=True,
        )
        self.llm.warmup()

    def rollout(self, step: int) -> RolloutArrays:
        """A group of answers to each of some tasks, which are a function of the seed and the step."""
        rng = np.random.default_rng([self.options.seed, 1 + step])  # 0 is the supervised start
        prompts = tasks(rng, self.options.tasks).tolist()
        answer = {"n": self.options.group, "max_tokens": NUM_DIGITS + 1, "stop_token_ids": [END]}
        asked = [SamplingParams(**answer, seed=seed) for seed in rng.integers(2**31, size=len(prompts)).tolist()]
        arrays = self.llm.rollout(prompts, asked, use_tqdm=False).arrays(pad_to=LENGTH, pad_id=PAD)
        if not (arrays.weights_versions[arrays.mask] == self.llm.weights_version).all():
            raise RuntimeError("a token was drawn by other weights than the trainer's")
        return arrays

    def step(self, step: int, trainer: Trainer) -> tuple[Trainer, Record]:
        """Samples, rewards, learns, and gives the engine the new parameters."""
        began = time.perf_counter()
        with compilations() as programs:
            arrays = self.rollout(step)
            sampled = time.perf_counter()
            values = rewards(arrays.tokens)
            advantage = advantages(values, self.options.group)
            differences = []
            for _ in range(self.options.updates):
                trainer, difference = self.improve(trainer, arrays, advantage)
                differences.append(difference)
            self.llm.update_params(jax.block_until_ready(trainer.params))
        seconds = (sampled - began, time.perf_counter() - sampled)
        return trainer, Record(step, float(values.mean()), *seconds, float(differences[0]), len(programs))


def run(options: argparse.Namespace) -> list[Record]:
    """Trains, from the start or from the last checkpoint, to `options.steps`; the records of all steps."""
    graphdef, params = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(options.seed)))
    deciding = {name: value for name, value in vars(options).items() if name not in FREE_OPTIONS}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(options.rate))
    trainer = Trainer(params, optimizer.init(params))
    with ocp.CheckpointManager((options.out / CHECKPOINTS).absolute()) as checkpoints:
        if (checkpoints.latest_step() is not None) != options.resume:
            remedy = "there is none: leave out --resume" if options.resume else "there is one: add --resume"
            raise ValueError(f"checkpoint in {options.out}: {remedy}, or name another folder with --out")
        if options.resume:
            trainer, records = restore(checkpoints, trainer, deciding)
        else:
            trainer, records = trainer._replace(params=supervised_start(graphdef, params, options)), []
        grpo = GRPO(graphdef, optimizer, trainer.params, options)
        steps = range(len(records), options.steps)
        bar = tqdm(steps, desc="GRPO", unit="step", initial=steps.start, total=options.steps)
        for step in bar:
            trainer, record = grpo.step(step, trainer)
            records.append(record)
            bar.set_postfix(reward=f"{np.mean([record.reward for record in records[-10:]]):.3f}", refresh=False)
            if len(records) % options.save_every == 0 or len(records) == options.steps:
                with (options.out / TABLE).open("w", newline="") as file:
                    csv.writer(file).writerows([Record._fields, *records])
                history = ocp.args.JsonSave({"options": deciding, "records": records})
                items = ocp.args.Composite(trainer=ocp.args.StandardSave(trainer), history=history)
                checkpoints.save(len(records), args=items)
    return records


def restore(checkpoints: Any, trainer: Trainer, deciding: dict[str, Any]) -> tuple[Trainer, list[Record]]:
    """The last checkpoint. A ValueError if other options decided what its steps computed, which it names."""
    items = ocp.args.Composite(trainer=ocp.args.StandardRestore(trainer), history=ocp.args.JsonRestore())
    saved = checkpoints.restore(checkpoints.latest_step(), args=items)
    before = saved.history["options"].items()
    other = [f"--{name.replace('_', '-')} {value}" for name, value in before if deciding[name] != value]
    if other:
        raise ValueError(f"--resume: the run began with {' '.join(other)}; give the same, or another folder with --out")
    return saved.trainer, [Record(*values) for values in saved.history["records"]]


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """Gathers the seconds of each program that XLA compiles."""
    programs: list[float] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield programs
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def show(records: list[Record]) -> None:
    """The run in at most ten lines, and what it comes to."""
    length = -(-len(records) // 10)
    parts = [np.array(records[first : first + length]) for first in range(0, len(records), length)]  # [steps, fields]
    print("    steps   mean reward   s a rollout   s a training")
    for part in parts:
        reward, (rollout, train) = part[:, 1].mean(), np.median(part[:, 2:4], axis=0)
        span, bar = f"{part[0, 0]:.0f} to {part[-1, 0]:.0f}", "#" * round(40 * reward)
        print(f"{span:>9} {reward:>13.3f} {rollout:>13.3f} {train:>14.3f}   {bar}")
    steps, _, rollouts, trainings, differences, compiled = np.concatenate(parts).T
    first, last = parts[0][:, 1].mean(), parts[-1][:, 1].mean()
    warm = compiled == 0
    share = rollouts[warm].sum() / max((rollouts + trainings)[warm].sum(), 1e-9)
    print(f"mean reward: {first:.3f} at first, {last:.3f} in the end, {last / max(first, 1e-9):.1f} times as much")
    print(f"rollouts took {share:.0%} of {(rollouts + trainings)[warm].sum():.1f} s, the steps that compiled left out")
    print(f"log-probabilities of engine and trainer differ by at most {differences.max():.1e} before an update")
    print(f"programs were compiled in the steps {steps[~warm].astype(int).tolist()}")


def draw(records: list[Record], path: pathlib.Path) -> None:
    """The curve as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path.name}: matplotlib is not there (pip install matplotlib)", file=sys.stderr)
        return
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot([record.reward for record in records])
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1), title=f"GRPO: sorting {NUM_DIGITS} digits")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("grpo"), help="checkpoints, table and picture")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, with the same options")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150, help="of GRPO")
    parser.add_argument("--tasks", type=int, default=16, help="tasks a step")
    parser.add_argument("--group", type=int, default=16, help="samples of each task")
    parser.add_argument("--updates", type=int, default=2, help="gradient steps on each rollout")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate of GRPO")
    parser.add_argument("--start-steps", type=int, default=40, help="of the supervised start")
    parser.add_argument("--start-rate", type=float, default=1e-3, help="learning rate of the supervised start")
    parser.add_argument("--save-every", type=int, default=50, help="steps from checkpoint to checkpoint")
    options = parser.parse_args()
    try:
        counts = (options.steps, options.tasks, options.group, options.updates, options.save_every)
        if min(counts) < 1 or options.start_steps < 0 or not 0 <= options.seed < 2**63:
            raise ValueError("--seed is from 0 to 2**63 - 1, --start-steps at least 0, every other count at least 1")
        records = run(options)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    show(records)
    draw(records, options.out / PICTURE)


if __name__ == "__main__":
    main()
