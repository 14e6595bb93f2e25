"""The device in plain Python, for tests of the host side without jax: rows, block ids, and what every slot holds.

It does what `pagedjax.block_table` and the step do, and fails where the scheduler has promised something that is not
so. In place of K/V a slot holds a hash of the weights, the salt and all tokens up to its own, and every query looks at
what it would attend to: a block of another prefix, a stale one or a missing copy does not go unnoticed.
"""

from __future__ import annotations

import collections
import dataclasses

from pagedjax.plan import Admission, StepPlan
from pagedjax.request import Sequence

NULL_BLOCK = 0


def next_token(tokens: list[int], index: int = 0) -> int:
    """What sample `index` of a request draws after these tokens."""
    state = 17 + 5 * index
    for token in tokens:
        state = (state * 31 + token + 7) % 1009
    return state % 50


class Row:
    """A sequence as the device knows it: copied at admission, never looked at on the host again."""

    def __init__(self, sequence: Sequence, version: int) -> None:
        self.tokens, self.version = list(sequence.token_ids), version
        self.end_len, self.stop_ids, self.index = sequence.end_len, sequence.stop_ids, sequence.index
        self.blocks: list[int] = []
        self.num_computed = 0
        self.active = True
        self._hashes = [hash((version, sequence.params.cache_salt))]

    def kv(self, position: int) -> int:
        """What stands for K/V of the token there."""
        while len(self._hashes) < position + 2:
            self._hashes.append(hash((self._hashes[-1], self.tokens[len(self._hashes) - 1])))
        return self._hashes[position + 1]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a plan produced."""

    sampled: dict[int, list[int]]  # tokens by row
    filled: dict[int, list[int]]  # ids of the blocks that became full, by row
    seq_lens: dict[int, int]
    num_free_blocks: int


class Device:
    """Rows and blocks.

    Args:
        num_usable_blocks: of the pool, without the null block.
        block_size: tokens a block.
        retains: take the prefix cache's reference to every block that becomes full.
        window: keys a query sees; None: all.
    """

    def __init__(
        self, num_usable_blocks: int, block_size: int, *, retains: bool = False, window: int | None = None
    ) -> None:
        self.num_usable_blocks, self.block_size, self.retains, self.window = (
            num_usable_blocks,
            block_size,
            retains,
            window,
        )
        self.rows: dict[int, Row] = {}
        self.free = list(range(num_usable_blocks, NULL_BLOCK, -1))
        self.ref_counts = [0] * (num_usable_blocks + 1)
        self.retained: set[int] = set()
        self.slots: list[list[int | None]] = [[None] * block_size for _ in self.ref_counts]
        self.version = 0  # of the weights
        self.num_computed = 0  # tokens, since the start

    def num_free_after(self, releases: list[int], drops: list[int]) -> int:
        """Free blocks once these rows and references have been given back."""
        counts = list(self.ref_counts)
        for block_id in [*drops, *(block_id for row in releases for block_id in self.rows[row].blocks)]:
            counts[block_id] -= 1
        return sum(count == 0 for count in counts[1:])

    def run(self, plan: StepPlan) -> Result:
        self.change_rows(plan)
        before = {row: state.num_computed for row, state in self.rows.items()}
        sampled: dict[int, list[int]] = {row: [] for row in plan.scheduled}
        for step in range(plan.num_steps):
            counts = {}
            for row, part in plan.scheduled.items():
                state = self.rows[row]
                assert step or state.num_computed == part.first_position or not state.active
                if state.active:
                    counts[row] = 1 if step else part.num_tokens
            self._compute(counts)
            for row in counts:
                sampled[row] += self._sample(self.rows[row])
        filled = {row: self._retain(self.rows[row], first) for row, first in before.items()}
        self._pass_window()
        lens = {row: state.num_computed for row, state in self.rows.items()}
        return Result(sampled, filled, lens, len(self.free))

    def change_rows(self, plan: StepPlan) -> None:
        """Releases, drops, adopts, forks. Parents are read as they are before any row starts."""
        for row in plan.releases:
            self._give_back(self.rows.pop(row).blocks)
        for block_id in plan.drops:
            assert block_id in self.retained, "drops what the cache does not hold"
            self.retained.remove(block_id)
            self._give_back([block_id])
        old = {row: list(state.blocks) for row, state in self.rows.items()}
        for admission in plan.admits:
            self._start(admission, old)

    def defragment(self) -> dict[int, int]:
        """Moves the used blocks to the front; returns where each that moved has gone."""
        used = [block_id for block_id, count in enumerate(self.ref_counts) if count]
        gaps = [block_id for block_id in range(1, len(used) + 1) if not self.ref_counts[block_id]]
        moves = dict(zip([block_id for block_id in used if block_id > len(used)], gaps, strict=True))
        for src, dst in moves.items():
            self.ref_counts[dst], self.ref_counts[src] = self.ref_counts[src], 0
            self.slots[dst], self.slots[src] = self.slots[src], [None] * self.block_size
        for row in self.rows.values():
            row.blocks = [moves.get(block_id, block_id) for block_id in row.blocks]
        self.retained = {moves.get(block_id, block_id) for block_id in self.retained}
        self.free = list(range(self.num_usable_blocks, len(used), -1))
        return moves

    def _start(self, admission: Admission, old: dict[int, list[int]]) -> None:
        sequence, size = admission.sequence, self.block_size
        assert sequence.row is not None
        assert sequence.row not in self.rows, "admitted to a row that is taken"
        row = self.rows[sequence.row] = Row(sequence, self.version)
        row.num_computed = admission.num_tokens
        assert admission.num_tokens < len(row.tokens), "no token is left to run"
        if admission.parent is None:
            assert len(admission.block_ids) * size == admission.num_tokens, "cached blocks are full ones"
            row.blocks = list(admission.block_ids)
        else:
            assert not admission.block_ids, "a fork starts from a row alone"
            assert admission.parent in old, "the row to fork is not taken"
            assert admission.num_tokens <= self.rows[admission.parent].num_computed, "forked before it was computed"
            row.blocks = old[admission.parent][: -(-admission.num_tokens // size)]
        for block_id in row.blocks:
            assert block_id == NULL_BLOCK or self.ref_counts[block_id] > 0, "shares a block that nobody holds"
            self.ref_counts[block_id] += block_id != NULL_BLOCK
        for position in range(admission.num_tokens):
            block_id = row.blocks[position // size]
            held = self.slots[block_id][position % size]
            assert block_id == NULL_BLOCK or held == row.kv(position), "shares a block with other content"

    def _compute(self, counts: dict[int, int]) -> None:
        """Appends and writes this many tokens to each row, then looks at all that their queries see."""
        self._copy_tails(list(counts))
        for row, count in counts.items():
            state = self.rows[row]
            assert state.num_computed + count <= len(state.tokens), "computes tokens that nobody knows"
            for position in range(state.num_computed, state.num_computed + count):
                if position % self.block_size == 0:
                    state.blocks.append(self._take())
                self.slots[state.blocks[-1]][position % self.block_size] = state.kv(position)
        for row, count in counts.items():
            state = self.rows[row]
            for position in range(state.num_computed, state.num_computed + count):
                first = 0 if self.window is None else max(position - self.window + 1, 0)
                for seen in range(first, position + 1):
                    held = self.slots[state.blocks[seen // self.block_size]][seen % self.block_size]
                    assert held == state.kv(seen), "attends to what it has not written"
            state.num_computed += count
            self.num_computed += count

    def _copy_tails(self, rows: list[int]) -> None:
        """Copy-on-write: one of the writers keeps a shared tail if all its holders write, else none does."""
        writers = collections.defaultdict(list)
        for row in rows:
            if self.rows[row].num_computed % self.block_size:
                writers[self.rows[row].blocks[-1]].append(row)
        for tail, copiers in writers.items():
            assert tail != NULL_BLOCK
            if self.ref_counts[tail] == len(copiers):
                copiers.pop()
            for row in copiers:
                copy = self._take()
                self.slots[copy] = list(self.slots[tail])
                self.rows[row].blocks[-1] = copy
                self._give_back([tail])

    def _sample(self, state: Row) -> list[int]:
        if state.num_computed < len(state.tokens):
            return []
        token = next_token(state.tokens, state.index)
        state.tokens.append(token)
        state.active = token not in state.stop_ids and len(state.tokens) < state.end_len
        return [token]

    def _retain(self, state: Row, first: int) -> list[int]:
        if not self.retains:
            return []
        filled = state.blocks[first // self.block_size : state.num_computed // self.block_size]
        for block_id in filled:
            assert block_id not in self.retained
            self.retained.add(block_id)
            self.ref_counts[block_id] += 1
        return filled

    def _pass_window(self) -> None:
        if self.window is None:
            return
        for state in self.rows.values():
            passed = max(state.num_computed - self.window, 0) // self.block_size
            self._give_back(state.blocks[:passed])
            state.blocks[:passed] = [NULL_BLOCK] * passed

    def _take(self) -> int:
        assert self.free, "the device ran out of blocks"
        block_id = self.free.pop()
        self.ref_counts[block_id] = 1
        return block_id

    def _give_back(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            assert self.ref_counts[block_id] > 0
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self.slots[block_id] = [None] * self.block_size
                self.free.append(block_id)
