"""pagedjax.scheduler at random: prefixes shared and not, samples, salts, windows, weights that change, aborts.

`Loop.step` checks the scheduler's promises; here every sequence has to end, once, with the tokens it has alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from host_loop import Loop, alone

from pagedjax.request import Sequence


class Driver:
    """Feeds a loop and remembers what is to come out.

    Args:
        seed: of every choice.
        options: of the loop, in place of those drawn.
    """

    def __init__(self, seed: int, **options: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.usable = rng.randint(3, 14)
        self.block_size = rng.choice([1, 2, 4])
        drawn = {
            "max_num_seqs": rng.randint(1, 6),
            "max_num_batched_tokens": rng.randint(1, 20),
            "max_model_len": rng.randint(8, 40),
            "decode_steps": rng.choice([1, 3, 8]),
            "watermark": rng.choice([0.0, 0.01, 0.3]),
            "window": rng.choice([None, None, rng.randint(1, 12)]),
        }
        self.loop = Loop(num_blocks=self.usable + 1, block_size=self.block_size, **(drawn | options))
        self.prefixes = [[rng.randrange(50) for _ in range(rng.randint(0, 20))] for _ in range(3)]
        self.stop_ids: dict[Sequence, tuple[int, ...]] = {}
        self.aborted: set[Sequence] = set()

    def run(self, num_steps: int = 60, *, late_aborts: bool, changes_weights: bool) -> None:
        rng, loop = self.rng, self.loop
        if late_aborts:
            loop.during = self.abort_any
        for _ in range(num_steps):
            if rng.random() < 0.5:
                self.add()
            self.abort_any()
            if changes_weights and rng.random() < 0.05:
                loop.change_weights(recompute=rng.random() < 0.5)
            if rng.random() < 0.1 and not loop.ahead:  # the engine waits before it does that
                loop.defragment()
            loop.step()
        loop.during = lambda: None
        # A step each token, and one for every time that somebody is held until a prefix is there.
        loop.run(max_steps=sum(s.end_len + 1 for s in loop.arrivals if not s.finished) + 1)
        self.check()

    def prompt(self) -> list[int]:
        """Random tokens, behind what others began with, had in all, or have generated so far."""
        rng = self.rng
        start = rng.choice(self.prefixes)
        if self.stop_ids and rng.random() < 0.4:
            start = rng.choice(list(self.stop_ids)).token_ids
            start = start[: rng.choice([len(start), rng.randint(0, len(start))])]
        return [*start, *(rng.randrange(50) for _ in range(rng.choice([0, 1, rng.randint(0, 10)])))] or [7]

    def most_held(self, end_len: int) -> int:
        """Blocks that a sequence may hold at once: what it sees and a step's tokens, wherever they begin in a block."""
        size, scheduler = self.block_size, self.loop.scheduler
        in_all = -(-(end_len - 1) // size)
        if scheduler.ledger.window is None:
            return in_all
        stretch = scheduler.ledger.window + scheduler.max_num_batched_tokens
        return min(in_all, max(-(-(first + stretch) // size) for first in range(size)))

    def add(self) -> None:
        rng, loop = self.rng, self.loop
        prompt, max_tokens = self.prompt(), rng.randint(1, 20)
        stop_ids = tuple(rng.sample(range(50), rng.choice([0, 2])))
        options: dict[str, Any] = {"cache_salt": rng.choice([None, None, "a"]), "scores": rng.random() < 0.2}
        end_len = min(len(prompt) + max_tokens, loop.scheduler.max_model_len)
        if len(prompt) >= loop.scheduler.max_model_len or self.most_held(end_len) > self.usable:
            with pytest.raises(ValueError, match="raise"):
                loop.add_samples(prompt, 1, max_tokens)
            return
        for sequence in loop.add_samples(prompt, rng.choice([1, 1, 1, 2, 4, 8]), max_tokens, stop_ids, **options):
            host_stops = tuple(rng.sample(range(50), rng.choice([0, 0, 2])))
            loop.host_stops[sequence] = host_stops
            self.stop_ids[sequence] = stop_ids + host_stops

    def abort_any(self) -> None:
        unfinished = [s for s in self.loop.arrivals if not s.finished]
        if unfinished and self.rng.random() < 0.1:
            sequence = self.rng.choice(unfinished)
            self.loop.abort(sequence)
            self.aborted.add(sequence)

    def check(self) -> None:
        loop = self.loop
        assert sorted(s.arrival for s in loop.ended) == list(range(len(loop.arrivals)))
        for sequence, stop_ids in self.stop_ids.items():
            prompt, output = sequence.request.prompt_ids, sequence.output_ids
            expected = alone(prompt, sequence.end_len - len(prompt), stop_ids, sequence.index)
            assert output == (expected[: len(output)] if sequence in self.aborted else expected)
            if sequence.scores_from is not None and sequence not in self.aborted:
                assert len(sequence.scores) == len(prompt) - 1


@pytest.mark.parametrize("seed", range(40))
def test_without_a_cache(seed: int) -> None:
    Driver(seed).run(late_aborts=seed % 2 == 0, changes_weights=seed % 3 == 0)


@pytest.mark.parametrize("seed", range(80))
def test_with_a_cache(seed: int) -> None:
    Driver(seed, enable_prefix_caching=True).run(late_aborts=seed % 2 == 0, changes_weights=seed % 3 == 0)


@pytest.mark.parametrize("seed", range(80))
def test_planned_ahead(seed: int) -> None:
    driver = Driver(seed, enable_prefix_caching=seed % 3 > 0, window=None)
    driver.loop.ahead = True
    driver.run(late_aborts=seed % 2 == 0, changes_weights=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many(part: int) -> None:
    for seed in range(1000 + 200 * part, 1200 + 200 * part):
        driver = Driver(seed, enable_prefix_caching=seed % 4 > 0)
        driver.run(late_aborts=seed % 2 == 0, changes_weights=seed % 3 == 0)
