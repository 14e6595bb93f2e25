"""The block table against a plain Python allocator, over random sequences of every transition.

A NumPy array plays the KV pool, so a block that is shared, copied or reused wrongly shows as a wrong token. Loops are
cut to 4 lanes a turn, so that they turn more than once.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from plain_allocator import LOST, MAX_BLOCKS, NUM_BLOCKS, NUM_ROWS, Block, Model

from pagedjax import _block_sharing, _block_state
from pagedjax import block_table as bt

PADDING = 6  # block ids per call to retain and drop


def per_row(values: list[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(values), min_size=NUM_ROWS, max_size=NUM_ROWS)


some_blocks = st.lists(st.integers(0, 2**16), max_size=PADDING)


class Machine(RuleBasedStateMachine):
    """Every transition on the table and the model at once; after each, the two have to agree."""

    block_size = 2

    @initialize()
    def start(self) -> None:
        self.table = bt.create(NUM_BLOCKS, self.block_size, NUM_ROWS, MAX_BLOCKS)
        self.pool = np.full((NUM_BLOCKS, self.block_size), LOST)
        self.model = Model(self.block_size)
        self.ids: dict[Block, int] = {}
        self.next_token = 0

    def copy(self, copies: bt.BlockCopies) -> dict[int, int]:
        count = int(copies.count)
        src, dst = np.asarray(copies.src), np.asarray(copies.dst)
        assert not src[count:].any()
        assert not dst[count:].any()
        src, dst = src[:count], dst[:count]
        assert len(set(dst)) == count
        assert not set(src) & set(dst)
        self.pool[dst] = self.pool[src]
        return dict(zip(src.tolist(), dst.tolist(), strict=True))

    @rule(news=per_row([0, 0, 1, 2, 3, 5]))
    def append(self, news: list[int]) -> None:
        self.grow(news)

    @rule(only=st.integers(0, NUM_ROWS - 1), new=st.integers(-1, 11))
    def append_one(self, only: int, new: int) -> None:
        self.grow([new if row == only else 0 for row in range(NUM_ROWS)])

    @rule(new=st.integers(1, 2))
    def append_all(self, new: int) -> None:
        self.grow([new] * NUM_ROWS)

    def grow(self, news: list[int]) -> None:
        before = self.table
        self.table, copies, ok = bt.append(before, jnp.array(news, jnp.int32))
        need = self.model.needed(news)
        assert bool(ok) == (need is not None and need <= self.model.num_free())
        changed = self.copy(copies)
        if not ok:
            assert_equal_trees(self.table, before)
            assert not changed
            return
        copying, groups = self.model.copiers(news)
        for group in groups:
            kept = [row for row in group if self.tail_id(self.table, row) == self.tail_id(before, row)]
            assert len(kept) == 1, "all holders append: exactly one keeps the tail"
            copying += [row for row in group if row not in kept]
        assert int(copies.count) == len(copying)
        for row, new in enumerate(news):
            start = len(self.model.rows[row].tokens)
            tokens = list(range(self.next_token, self.next_token + new))
            self.next_token += new
            self.model.append(row, tokens, row in copying)
            entries = np.asarray(self.table.block_tables)[row]
            for position, token in enumerate(tokens, start):
                self.pool[entries[position // self.block_size], position % self.block_size] = token

    def tail_id(self, table: bt.BlockTable, row: int) -> int:
        """The block of the row's last token before this append."""
        column = (len(self.model.rows[row].tokens) - 1) // self.block_size
        return int(np.asarray(table.block_tables)[row, column])

    @rule(cuts=per_row([0, 0, 1, 2, 11, -1]))
    def truncate(self, cuts: list[int]) -> None:
        lengths = [len(row.tokens) - cut for row, cut in zip(self.model.rows, cuts, strict=True)]
        self.table = bt.truncate(self.table, jnp.array(lengths, jnp.int32))
        for row, length in enumerate(lengths):
            self.model.cut(row, length)

    @rule(chosen=st.sets(st.integers(0, NUM_ROWS - 1), max_size=2))
    def release(self, chosen: set[int]) -> None:
        rows = [row in chosen for row in range(NUM_ROWS)]
        self.table = bt.release(self.table, jnp.array(rows))
        for row in np.flatnonzero(rows):
            self.model.cut(int(row), 0)

    @rule(parents=per_row([-1, -1, 0, 1, 2, 3, NUM_ROWS]))
    def fork(self, parents: list[int]) -> None:
        self.table = bt.fork(self.table, jnp.array(parents, jnp.int32))
        self.model.fork(parents)

    @rule(parent=st.integers(0, NUM_ROWS - 1), children=st.integers(1, 14), idle=st.integers(0, 2 * NUM_ROWS))
    def fork_and_append(self, parent: int, children: int, idle: int) -> None:
        family = [row == parent or bool(children >> row & 1) for row in range(NUM_ROWS)]
        self.fork([parent if related else -1 for related in family])
        self.grow([int(related and row != idle) for row, related in enumerate(family)])

    @rule(window=st.integers(-1, 7))
    def free_outside_window(self, window: int) -> None:
        self.table = bt.free_outside_window(self.table, jnp.int32(window))
        self.model.slide(window)

    @rule(window=st.integers(1, 3), cut=st.integers(1, 4))
    def cut_into_what_the_window_passed(self, window: int, cut: int) -> None:
        self.free_outside_window(window)
        self.truncate([cut] * NUM_ROWS)
        self.grow([1] * NUM_ROWS)

    @rule(picks=some_blocks, noise=st.integers(-2, NUM_BLOCKS + 1))
    def retain(self, picks: list[int], noise: int) -> None:
        ids = [*self.pick_ids(self.model.live(), picks[: PADDING - 1]), noise]
        self.table = bt.retain(self.table, padded(ids))
        by_id = {self.ids[block]: block for block in self.model.live()}
        self.model.retained += [by_id[block_id] for block_id in ids if block_id in by_id]

    @rule(picks=some_blocks, noise=st.integers(-2, NUM_BLOCKS + 1))
    def drop(self, picks: list[int], noise: int) -> None:
        twice = self.pick_ids(self.model.retained, picks[:2]) * 2
        ids = [*twice, noise]
        self.table = bt.drop(self.table, padded(ids))
        for block_id in ids:
            block = next((b for b in self.model.retained if self.ids[b] == block_id), None)
            if block is not None:
                self.model.retained.remove(block)

    def pick_ids(self, blocks: list[Block], picks: list[int]) -> list[int]:
        return [self.ids[blocks[pick % len(blocks)]] for pick in picks] if blocks else []

    @rule(rows=st.tuples(*[st.integers(-1, NUM_ROWS)] * 2), data=st.data())
    def adopt(self, rows: tuple[int, int], data: st.DataObject) -> None:
        block_ids = np.full((2, MAX_BLOCKS), NUM_BLOCKS + 3)  # past the tokens' blocks anything may stand
        lengths, plans = [0, 0], {}
        for nth, row in enumerate(rows):
            chain, length = self.draw_chain(data)
            sound = data.draw(st.sampled_from([True, True, True, False]))
            ids = [self.ids[block] if block else bt.NULL_BLOCK for block in chain]
            if not sound:
                ids, length = self.spoil(ids, length, data)
            block_ids[nth, : len(ids)], lengths[nth] = ids, length
            if sound and 0 <= row < NUM_ROWS:
                plans[row] = (chain, length)
        self.table = bt.adopt(
            self.table, jnp.array(rows, jnp.int32), jnp.array(block_ids, jnp.int32), jnp.array(lengths, jnp.int32)
        )
        for row, (chain, length) in plans.items():
            self.model.adopt(row, chain, length)

    def draw_chain(self, data: st.DataObject) -> tuple[list[Block | None], int]:
        """Full live blocks, the last maybe part of one; sometimes with leading blocks that a window has passed."""
        full = [block for block in self.model.live() if len(block.tokens) == self.block_size]
        if not full:
            return [], 0
        chain = data.draw(st.lists(st.sampled_from(full), min_size=1, max_size=MAX_BLOCKS))
        passed = data.draw(st.integers(0, MAX_BLOCKS - len(chain)))
        length = (passed + len(chain)) * self.block_size
        return [None] * passed + chain, length - data.draw(st.integers(0, self.block_size - 1))

    def spoil(self, ids: list[int], length: int, data: st.DataObject) -> tuple[list[int], int]:
        """An adoption that has to be left out: a free block, a null block last or in between, or a bad length."""
        wrongs = [(ids, -1), (ids, MAX_BLOCKS * self.block_size + 1)]
        num_free = int(self.table.num_free_blocks)
        if ids and num_free:
            wrongs.append(([*ids[:-1], int(np.asarray(self.table.free_blocks)[num_free - 1])], length))
        if ids:
            wrongs.append(([*ids[:-1], data.draw(st.sampled_from([-1, NUM_BLOCKS]))], length))
        if len(ids) > 1 and ids[-2] != bt.NULL_BLOCK:
            wrongs.append(([*ids[:-1], bt.NULL_BLOCK], length))
        return data.draw(st.sampled_from(wrongs))

    @rule(picks=some_blocks, gone=st.sets(st.integers(0, NUM_ROWS - 1), max_size=2))
    def defragment(self, picks: list[int], gone: set[int]) -> None:
        self.retain(picks, bt.NULL_BLOCK)
        self.release(gone)
        self.table, copies = bt.defragment(self.table)
        moves = self.copy(copies)
        self.ids = {block: moves.get(self.ids[block], self.ids[block]) for block in self.model.live()}
        used = len(self.model.live())
        assert sorted(self.ids.values()) == list(range(1, used + 1))
        assert all(src > used for src in moves)

    @invariant()
    def agrees(self) -> None:
        entries, seq_lens = np.asarray(self.table.block_tables), np.asarray(self.table.seq_lens)
        known: dict[Block, int] = {block: self.ids[block] for block in self.model.live() if block in self.ids}
        for row, expected in enumerate(self.model.rows):
            assert seq_lens[row] == len(expected.tokens)
            for block, block_id in zip(expected.blocks, entries[row].tolist(), strict=False):
                assert (block is None) == (block_id == bt.NULL_BLOCK)
                if block is not None:
                    assert known.setdefault(block, block_id) == block_id
            held = [
                self.pool[entries[row, at // self.block_size], at % self.block_size]
                for at in range(len(expected.tokens))
            ]
            assert held == expected.tokens
        assert len(set(known.values())) == len(known), "two blocks of the model share an id"
        self.ids = known
        counts = np.asarray(self.table.ref_counts)
        assert {block_id: counts[block_id] for block_id in known.values()} == {
            self.ids[block]: self.model.holders(block) for block in known
        }
        assert int(self.table.num_free_blocks) == self.model.num_free()
        assert (self.pool[bt.NULL_BLOCK] == LOST).all()
        bt.check(self.table, [self.ids[block] for block in self.model.retained])


def padded(ids: list[int]) -> jax.Array:
    return jnp.array(ids + [bt.NULL_BLOCK] * (PADDING - len(ids)), jnp.int32)


def assert_equal_trees(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(autouse=True)
def four_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    transitions = [getattr(bt, name) for name in bt.__all__ if hasattr(getattr(bt, name), "clear_cache")]
    for module in (_block_state, _block_sharing):
        monkeypatch.setattr(module, "LANES", 4)
    for transition in transitions:
        transition.clear_cache()
    yield
    for transition in transitions:
        transition.clear_cache()


def run(block_size: int, max_examples: int, steps: int) -> None:
    machine = type("Machine", (Machine,), {"block_size": block_size})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_table_follows_the_model() -> None:
    run(block_size=2, max_examples=35, steps=30)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_table_follows_the_model_for_long(block_size: int) -> None:
    run(block_size, max_examples=50, steps=50)
