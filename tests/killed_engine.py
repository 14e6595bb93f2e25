"""A process that generates with the mock model and saves its state after every step: to be killed at any moment.

Started again, it goes on with the last state. `python killed_engine.py FOLDER RESULTS [kv]`: the state's folder, and a
file that gets a line of JSON for every finished request, before the state that no longer has it is saved. Two lines of
one request have to be equal: it was killed between them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import sys
from collections.abc import Callable
from typing import Any

import mock_engine
import mock_model
from mock_engine import GREEDY, SEEDED, Pieces, finish
from random_requests import random_params

from pagedjax import LLM, BeamSearchParams, RequestOutput, SamplingParams

# Two letters a token, so that stop strings end within tokens and across them.
TOKENIZER = Pieces({token: "abcdefgh"[token // 4 % 8] + "klmn"[token % 4] for token in range(mock_model.VOCAB)})

NUM_RANDOM = 6

Outputs = dict[str, dict[str, Any]]  # by request id


def stop_at(prompt: list[int], place: int) -> str:
    """A string that the greedy continuation has across its tokens number `place` and the next."""
    ids = mock_model.Oracle(prompt, GREEDY).generate()
    return TOKENIZER.decode(ids)[2 * place + 1 : 2 * place + 3]


def add_requests(llm: LLM) -> None:
    """Some of every kind, more than there is room for."""
    everything = SamplingParams(
        n=3, temperature=0.9, max_tokens=14, logprobs=2, prompt_logprobs=1, frequency_penalty=0.3
    )
    llm.add_request("samples", [1, 2, 3] * 4, dataclasses.replace(everything, sampled_logprobs=True, top_p=0.9))
    llm.add_request("greedy", [4], GREEDY)
    llm.add_request("stop", [5, 6], dataclasses.replace(GREEDY, stop=[stop_at([5, 6], 6), "zz"], logprobs=0))
    llm.add_request("held", [5, 6], dataclasses.replace(GREEDY, stop=stop_at([5, 6], 3) + "z", min_tokens=2))
    llm.add_request("seeded", [7] * 20, SEEDED)
    llm.add_request("unseeded", [7] * 20, dataclasses.replace(SEEDED, seed=None, repetition_penalty=1.2))
    llm._engine.add(llm._maker.scored("scored", [8] * 9, [[1, 2], [3] * 8], "salt"))
    search = BeamSearchParams(width=2, max_tokens=6)
    llm._engine.add(llm._maker.searched("searched", None, [9] * 5, search))
    rng = random.Random(0)
    for index in range(NUM_RANDOM):
        prompt = [rng.randrange(mock_model.VOCAB) for _ in range(rng.randint(1, 12))]
        params = dataclasses.replace(random_params(rng), max_tokens=12, min_tokens=0)
        llm.add_request(f"random {index}", prompt, params)


def plain(output: RequestOutput) -> dict[str, Any]:
    """An output as JSON has it, without what depends on when a request ran."""
    fields = dataclasses.asdict(output)
    del fields["metrics"], fields["num_cached_tokens"]
    return json.loads(json.dumps(fields))


def start(llm: LLM, add: Callable[[LLM], None]) -> None:
    """Requests to an idle engine that makes them as a new one would."""
    llm._maker.num_made = 0
    add(llm)


def step(llm: LLM, num_steps: int) -> Outputs:
    """Some steps on; what has ended."""
    outputs = [output for _ in range(num_steps) for output in llm.step()]
    return {output.request_id: plain(output) for output in outputs if output.finished}


def rest(llm: LLM) -> Outputs:
    outputs = {request_id: plain(output) for request_id, output in finish(llm).items()}
    llm.audit()
    return outputs


def main(folder: str, results: str, include_kv: bool) -> None:
    llm = LLM(mock_model.MockDecoder(), tokenizer=TOKENIZER, **mock_engine.OPTIONS)
    mock_engine.pace(llm, budget=7, decode_steps=2)
    try:
        llm.load_state(folder)
    except FileNotFoundError:
        add_requests(llm)
    while llm.has_unfinished_requests():
        print("step", flush=True)
        finished = [plain(output) for output in llm.step() if output.finished]
        with pathlib.Path(results).open("ab") as file:
            file.write("".join(json.dumps(output) + "\n" for output in finished).encode())
            file.flush()
            os.fsync(file.fileno())
        print("save", flush=True)
        llm.save_state(folder, include_kv=include_kv)
    llm.audit()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], include_kv="kv" in sys.argv[3:])
