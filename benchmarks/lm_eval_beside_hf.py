"""The lm-evaluation-harness with pagedjax and with its own `hf` model: the same tasks, answers and times side by side.

Run it from the root of the repository, where the harness, torch and transformers are installed:
`python benchmarks/lm_eval_beside_hf.py FOLDER`, a Hugging Face folder with its tokenizer. The tasks are made by a
seeded program and written to a temporary folder: they compare two programs, not models. Everything is float32 on the
CPU, in one process and one after the other. Prints a table and one line of JSON; fails where the two differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

TOLERANCE = 1e-3  # of a log-likelihood, in nats; of a whole text's, for each 100 tokens
GEN_TOKENS = 24
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "June")
THINGS = ("apples", "books", "coins", "pens", "stones", "cups", "keys", "shells")
OPPOSITES = ("hot cold", "big small", "old new", "light dark", "fast slow", "early late", "open closed", "full empty")
PLACES = ("the kitchen", "a small garden", "the old station", "an empty school", "the market", "a quiet library")


# Tasks


def question(rng: random.Random) -> dict[str, Any]:
    """One question with four different choices and the index of the right one."""
    kind = rng.randrange(4)
    if kind == 0:
        a, b = rng.sample(range(2, 60), 2)
        text, right, wrong = f"What is {a} plus {b}?", a + b, [a + b + d for d in rng.sample([-10, -2, -1, 1, 3, 9], 3)]
    elif kind == 1:
        name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randrange(20, 60), rng.randrange(2, 18)
        text = f"{name} has {a} {thing} and gives away {b} of them. How many {thing} does {name} have now?"
        right, wrong = f"{a - b} {thing}", [f"{a - b + d} {thing}" for d in rng.sample([-7, -1, 1, 2, 5, 2 * b], 3)]
    elif kind == 2:
        words = [pair.split() for pair in rng.sample(OPPOSITES, 4)]
        text, right, wrong = f"What is the opposite of {words[0][0]}?", words[0][1], [pair[1] for pair in words[1:]]
    else:
        names = rng.sample(NAMES, 4)
        text = f"{names[0]} stands before {names[1]}, {names[1]} before {names[2]}, {names[2]} before {names[3]}."
        text, right, wrong = f"{text} Who stands last?", names[3], names[:3]
    choices = [str(right), *map(str, wrong)]
    rng.shuffle(choices)
    return {"query": f"Question: {text}\nAnswer:", "choices": choices, "gold": choices.index(str(right))}


def document(rng: random.Random, num_sentences: int) -> dict[str, Any]:
    """A text without much sense."""
    sentences = (
        f"{rng.choice(NAMES)} carried {rng.randrange(2, 30)} {rng.choice(THINGS)} through {rng.choice(PLACES)}, "
        f"and {rng.choice(NAMES)} found it {rng.choice(OPPOSITES).split()[rng.randrange(2)]}."
        for _ in range(num_sentences)
    )
    return {"text": " ".join(sentences)}


def write_tasks(folder: pathlib.Path, num_items: int) -> None:
    """The tasks' data and what the harness has to know of them. JSON is YAML."""
    rng = random.Random(0)
    questions = [question(rng) for _ in range(num_items)]
    for item in questions:
        item["answer"] = item["choices"][item["gold"]]
    data = {
        "questions": questions,
        "examples": [{**item, "answer": item["choices"][item["gold"]]} for item in (question(rng) for _ in range(5))],
        "documents": [document(rng, num_sentences) for num_sentences in (1, 4, 12, 40, 80)],
    }
    for name, items in data.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    asked = {"test": "questions", "train": "examples"}
    choice = {
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    examples = {"num_fewshot": 5, "fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}}
    write_task(folder, "choice", asked, choice)
    write_task(folder, "choice_5_shot", asked, choice | examples)
    gen_kwargs = {"until": ["\n", "Question:"], "max_gen_toks": GEN_TOKENS, "do_sample": False}
    answer = {
        "output_type": "generate_until",
        "doc_to_text": "query",
        "doc_to_target": "answer",
        "generation_kwargs": gen_kwargs,
        "metric_list": [{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
    }
    write_task(folder, "answer", asked, answer)
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    }
    write_task(folder, "text", {"test": "documents"}, rolling)


def write_task(folder: pathlib.Path, name: str, splits: dict[str, str], settings: dict[str, Any]) -> None:
    task = {
        "task": f"made_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: str(folder / f"{file}.jsonl") for split, file in splits.items()}},
        "test_split": "test",
        **settings,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))


# Runs


@dataclasses.dataclass
class Run:
    """One task with one model."""

    metrics: dict[str, float]
    responses: list[Any]  # in the order of the requests: (logprob, is_greedy), a text, or a logprob
    seconds: float  # within the model
    cpu_seconds: float  # the same of all threads, which tells less of what else the machine does


def evaluate(lm: Any, task: str, manager: Any, limit: int | None) -> Run:
    import lm_eval

    seconds = cpu_seconds = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(requests: Any) -> Any:
            nonlocal seconds, cpu_seconds
            start, cpu_start = time.perf_counter(), time.process_time()
            found = method(requests, disable_tqdm=True)
            seconds += time.perf_counter() - start
            cpu_seconds += time.process_time() - cpu_start
            return found

        return run

    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(lm, name, timed(getattr(type(lm), name).__get__(lm)))
    options = {"limit": limit, "bootstrap_iters": 0, "log_samples": True}
    results = lm_eval.simple_evaluate(model=lm, tasks=[task], task_manager=manager, **options)
    metrics = {
        name.partition(",")[0]: value
        for name, value in results["results"][task].items()
        if isinstance(value, float) and "stderr" not in name
    }
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return Run(metrics, [entry for sample in samples for (entry,) in sample["resps"]], seconds, cpu_seconds)


def difference(found: Run, wanted: Run) -> tuple[float, int]:
    """The largest between two log-likelihoods, and how many texts, or flags of being the most likely, differ."""
    largest, num_different = 0.0, 0
    for ours, theirs in zip(found.responses, wanted.responses, strict=True):
        if isinstance(ours, str):
            num_different += ours != theirs
            continue
        (ours, our_flag), (theirs, their_flag) = (
            entry if isinstance(entry, tuple | list) else (entry, None) for entry in (ours, theirs)
        )
        largest, num_different = max(largest, abs(ours - theirs)), num_different + (our_flag != their_flag)
    return largest, num_different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Hugging Face folder with config, weights and tokenizer")
    parser.add_argument("--items", type=int, default=200, help="questions of the task without examples")
    parser.add_argument("--few", type=int, default=40, help="questions of the others")
    parser.add_argument("--max-length", type=int, default=512, help="most tokens the models are given")
    parser.add_argument("--hf-batch-sizes", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"HF_HOME": f"{name}/hf", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        rows = compare(options, pathlib.Path(name))
    show(rows, options)
    return int(any(row["max_difference"] > row["tolerance"] or row["num_different"] for row in rows))


def compare(options: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from pagedjax.lm_eval import PagedJaxLM

    write_tasks(folder, options.items)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    theirs = HFLM(options.model, dtype="float32", device="cpu", max_length=options.max_length)
    # Sixteen rows: a sampler over all of 64 takes longer than four short continuations on a CPU.
    ours = PagedJaxLM(options.model, dtype="float32", max_length=options.max_length, max_num_seqs=16)
    start = time.perf_counter()
    ours.llm.warmup()
    print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    rows = []
    for task, limit, tolerance in (
        ("made_choice", None, TOLERANCE),
        ("made_choice_5_shot", options.few, TOLERANCE),
        ("made_answer", options.few, TOLERANCE),
        ("made_text", None, 20 * TOLERANCE),  # texts of up to 2,000 tokens
    ):
        found = evaluate(ours, task, manager, limit)
        times, cpu_times = {}, {}
        for batch_size in options.hf_batch_sizes:
            theirs.batch_size_per_gpu = batch_size
            wanted = evaluate(theirs, task, manager, limit)
            times[batch_size], cpu_times[batch_size] = wanted.seconds, wanted.cpu_seconds
            if batch_size == options.hf_batch_sizes[0]:
                reference = wanted
        largest, num_different = difference(found, reference)
        rows.append(
            {
                "task": task,
                "requests": len(found.responses),
                "hf": reference.metrics,
                "pagedjax": found.metrics,
                "max_difference": largest,
                "tolerance": tolerance,
                "num_different": num_different,
                "hf_seconds": times,
                "hf_cpu_seconds": cpu_times,
                "pagedjax_seconds": found.seconds,
                "pagedjax_cpu_seconds": found.cpu_seconds,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    sizes = options.hf_batch_sizes
    head = "".join(f"{f'hf s, batch {size}':>16}" for size in sizes)
    print(
        f"{'task':<20}{'requests':>9}{'metric':>17}{'hf':>10}{'pagedjax':>10}{'max |d|':>10}{'others':>8}{head}", end=""
    )
    print(f"{'pagedjax s':>12}")
    for row in rows:
        for index, (metric, value) in enumerate(row["hf"].items()):
            first = index == 0
            print(f"{row['task'] if first else '':<20}{row['requests'] if first else '':>9}", end="")
            print(f"{metric:>17}{value:>10.4f}{row['pagedjax'][metric]:>10.4f}", end="")
            if first:
                print(f"{row['max_difference']:>10.6f}{row['num_different']:>8}", end="")
                print("".join(f"{row['hf_seconds'][size]:>16.1f}" for size in sizes), end="")
                print(f"{row['pagedjax_seconds']:>12.1f}", end="")
            print()
    print(json.dumps({"model": options.model, "max_length": options.max_length, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
