"""Which of the mock model's weights everything was computed with, from the plans: K and V, draws, prompt logprobs.

The mock's one parameter, its salt, is stored with the K and V of every token and moves the logits, so that the logits
of a request are known exactly however often weights have changed while it ran, and whatever it kept of older ones.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
import mock_model
import numpy as np
import pytest

from pagedjax import LLM
from pagedjax.plan import NO_TOKEN, StepPlan, StepResult
from pagedjax.request import Sequence

# Dimensions: N tokens of one sequence, V token ids.


@dataclasses.dataclass(frozen=True)
class Origin:
    """What logits came from."""

    kv: tuple[int, ...]  # i[N], the salt in force when each token's K and V was computed
    salt: int  # that when the logits were

    def logits(self, tokens: list[int]) -> np.ndarray:
        """f64[V], after the first N tokens."""
        return mock_model.raw_logits(tokens[: len(self.kv)], self.kv, self.salt)[-1]


class WeightHistory:
    """Follows the plans of an engine from now on.

    Attributes:
        kv: of each sequence, the salt that each token's K and V was computed with.
        draws: of each sequence, where the logits of each drawn token came from.
        scores: the same for the prompt's second token, its third, and so on, where their logprobs are wanted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        self.llm, self.salt = llm, 0
        self.kv: dict[Sequence, list[int]] = {}
        self.draws: defaultdict[Sequence, list[Origin]] = defaultdict(list)
        self.scores: defaultdict[Sequence, list[Origin]] = defaultdict(list)
        self._rows: dict[int, list[int]] = {}  # `kv` of what was last in each row
        self._change_rows, self._start_step = llm._runner.change_rows, llm._runner.start
        monkeypatch.setattr(llm._runner, "change_rows", self._start)
        monkeypatch.setattr(llm._runner, "start", self._follow)

    def change(self, salt: int, running: Literal["refuse", "recompute", "keep"]) -> None:
        """Other weights; raises as the engine does."""
        self.llm.update_params({"salt": jnp.float32(salt)}, running=running)
        self.salt = salt
        if running == "recompute":  # the prompt's logprobs too
            for request in self.llm._engine.requests.values():
                for sequence in request.sequences:
                    if not sequence.finished:
                        self.scores.pop(sequence, None)

    def has_changed(self, sequence: Sequence) -> bool:
        """Whether it has K and V, or draws, of different weights."""
        origins = [*self.draws[sequence], *self.scores[sequence]]
        salts = {*self.kv.get(sequence, ()), *(origin.salt for origin in origins)}
        return len(salts.union(*(origin.kv for origin in origins))) > 1

    def drawn_from(self, sequence: Sequence, num_given: int, tokens: list[int]) -> np.ndarray:
        """f64[N, V]: the logits after each token, known from the last given one on."""
        logits = np.zeros((len(tokens), mock_model.VOCAB))
        for place, origin in enumerate(self.draws[sequence][: len(tokens) - num_given], num_given):
            assert len(origin.kv) == place
            logits[place - 1] = origin.logits(tokens)
        return logits

    def scored_from(self, sequence: Sequence, prompt: list[int]) -> np.ndarray:
        """f64[scores so far, V]: the logits that the logprobs of the prompt's second token, third and so on are of."""
        logits = [origin.logits(prompt) for origin in self.scores[sequence]]
        return np.reshape(logits, (-1, mock_model.VOCAB))

    def _start(self, plan: StepPlan) -> None:
        """A fork has its parent's K and V, as of before the plan; cached blocks are of the weights in force."""
        started: dict[int, list[int]] = {}
        for admission in plan.admits:
            assert admission.sequence.row is not None
            kv = [self.salt] * admission.num_tokens
            if admission.parent is not None:
                kv = self._rows[admission.parent][: admission.num_tokens]
                assert admission.sequence.request.beams is not None or {*kv} <= {self.salt}, (
                    "a sample starts from old K/V"
                )
            started[admission.sequence.row] = self.kv[admission.sequence] = kv
        self._rows |= started
        self._change_rows(plan)

    def _follow(self, plan: StepPlan) -> Callable[[], StepResult]:
        result = self._start_step(plan)
        kv, salt = {row: self._rows[row] for row in plan.scheduled}, self.salt
        for (row, part), length in zip(plan.scheduled.items(), plan.expected_lens.tolist(), strict=True):
            assert len(kv[row]) == part.first_position
            kv[row] += [salt] * (length - part.first_position)  # the next plan may fork it before the result is there
        return lambda: self._took(plan, kv, salt, result())

    def _took(self, plan: StepPlan, kv_of_rows: dict[int, list[int]], salt: int, result: StepResult) -> StepResult:
        for row, part in plan.scheduled.items():
            sequence, kv = part.sequence, kv_of_rows[row]
            if sequence.epoch != part.epoch:
                continue  # ended while this step was on its way
            seq_len = int(result.seq_lens[row])
            kv += [salt] * (seq_len - len(kv))  # beyond what the plan counted on
            num_drawn = int(np.count_nonzero(result.tokens[:, row] != NO_TOKEN))
            lengths = range(seq_len - num_drawn + 1, seq_len + 1)
            self.draws[sequence] += [Origin(tuple(kv[:length]), salt) for length in lengths]
            if sequence.scores_from is not None:
                scores, num_wanted = self.scores[sequence], len(sequence.given_ids) - 1
                for length in range(part.first_position + 1, min(seq_len, num_wanted) + 1):
                    if length == len(scores) + 1:
                        scores.append(Origin(tuple(kv[:length]), salt))
        return result
