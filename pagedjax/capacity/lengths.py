"""Blocks that a sequence holds: at one length, and on average over its life.

A request of p prompt and o output tokens takes o steps: the first computes the prompt and draws a token, each further
one computes the token drawn last and draws another. The last token drawn is never computed. So it holds
ceil((p + t) / B) blocks in step t = 0 .. o - 1, and of a sliding window only those that a later query can see.

p prompt, o output, B block_size, W window, n tokens computed, c most tokens a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

Count = Any  # an int, or an array of them


@dataclasses.dataclass(frozen=True)
class BlockCounts:
    """How many blocks a number of tokens takes; the rules are those of `pagedjax.block_ledger`.

    Attributes:
        block_size: tokens a block.
        window: keys a later query sees where every layer has a sliding window, else None.
        max_new_tokens: most tokens that a sequence gets in one step.
    """

    block_size: int
    window: int | None = None
    max_new_tokens: int = 1

    def covering(self, num_tokens: Count) -> Count:
        """Blocks of this many tokens, the window aside."""
        return -(-num_tokens // self.block_size)

    def passed(self, num_computed: Count) -> Count:
        """Leading blocks that no query sees any more, and that have been given back."""
        if self.window is None:
            return 0 * num_computed
        return np.maximum(num_computed - self.window, 0) // self.block_size

    def room(self, num_computed: Count, num_tokens: Count) -> Count:
        """Most blocks held at once, beyond those of `num_computed` tokens, on the way to `num_tokens`."""
        held = self.covering(num_computed)
        grown = np.maximum(self.covering(num_tokens) - held, 0)
        if self.window is None:
            return grown
        return np.minimum(grown, np.maximum(self.most - (held - self.passed(num_computed)), 0))

    @property
    def most(self) -> int:
        """Most blocks a sequence holds at once, however long it is; there has to be a window."""
        assert self.window is not None
        return self.covering(self.window + self.max_new_tokens - 1) + 1

    def at_most(self, num_tokens: int) -> int:
        """Most blocks a sequence holds at once on the way to `num_tokens`."""
        return int(self.room(0, num_tokens))

    def over_life(self, prompt_len: int, output_len: int) -> np.ndarray:
        """i64[o]: blocks held in each step of a request that is never preempted."""
        computed = prompt_len + np.arange(output_len)  # after the step
        before = np.concatenate([[0], computed[:-1]])  # what the window has passed is given back after a step
        return np.minimum(self.covering(computed) - self.passed(before), self.room(0, computed))

    def mean_over_life(self, lengths: Iterable[tuple[int, int]]) -> float:
        """Blocks held by a row, averaged over the steps of all requests (prompt_len, output_len)."""
        total = num_steps = 0
        for prompt_len, output_len in lengths:
            total += int(self.over_life(prompt_len, output_len).sum())
            num_steps += output_len
        return total / num_steps
