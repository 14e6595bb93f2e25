"""A state machine that drives the block table and a plain Python allocator through random sequences of transitions.

A NumPy array plays the KV pool, so a block that is shared, copied or reused wrongly shows as a wrong token. Transitions
are looked up in `pagedjax.block_table` at every call, so that a test may plant others there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from plain_allocator import LOST, MAX_BLOCKS, NUM_BLOCKS, NUM_ROWS, Block, Model

from pagedjax import block_table as bt

PADDING = 6  # block ids per call to retain and drop


def per_row(values: list[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(values), min_size=NUM_ROWS, max_size=NUM_ROWS)


two_rows = st.tuples(*[st.integers(-1, NUM_ROWS)] * 2) | st.integers(0, NUM_ROWS - 1).map(lambda row: (row, row))
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
        assert len(set(dst)) == count, "two copies go to one block"
        assert not set(src) & set(dst), "a copy's source is another's destination"
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
        assert bool(ok) == (need is not None and need <= self.model.num_free()), f"ok is {ok}; it takes {need} blocks"
        changed = self.copy(copies)
        if not ok:
            assert_equal_trees(self.table, before)
            assert not changed, "copies of an append that failed"
            return
        copying, groups = self.model.copiers(news)
        for group in groups:
            kept = [row for row in group if self.tail_id(self.table, row) == self.tail_id(before, row)]
            assert len(kept) == 1, "all holders append: exactly one keeps the tail"
            copying += [row for row in group if row not in kept]
        assert int(copies.count) == len(copying), "not every shared tail is copied, or one that is not shared"
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

    @rule(parents=st.permutations(range(NUM_ROWS)))
    def change_places(self, parents: list[int]) -> None:
        self.fork(parents)

    @rule(parent=st.integers(0, NUM_ROWS - 1), children=st.integers(1, 14), idle=st.integers(0, 2 * NUM_ROWS))
    def fork_and_append(self, parent: int, children: int, idle: int) -> None:
        family = [row == parent or bool(children >> row & 1) for row in range(NUM_ROWS)]
        self.fork([parent if related else -1 for related in family])
        self.grow([int(related and row != idle) for row, related in enumerate(family)])

    @rule(window=st.integers(-1, 7))
    def free_outside_window(self, window: int) -> None:
        self.table = bt.free_outside_window(self.table, jnp.int32(window))
        self.model.slide(window)

    @rule(row=st.integers(0, NUM_ROWS - 1), column=st.integers(0, MAX_BLOCKS - 1))
    def slide_until_one_key_of_a_block_is_left(self, row: int, column: int) -> None:
        last_key = (column + 1) * self.block_size - 1
        self.free_outside_window(max(len(self.model.rows[row].tokens) - last_key, 0))

    @rule(window=st.integers(1, 3), cut=st.integers(1, 4))
    def cut_into_what_the_window_passed(self, window: int, cut: int) -> None:
        self.free_outside_window(window)
        self.truncate([cut] * NUM_ROWS)
        self.grow([1] * NUM_ROWS)

    @rule(picks=some_blocks, noise=st.integers(-2, NUM_BLOCKS + 1))
    def retain(self, picks: list[int], noise: int) -> None:
        self.retain_ids([*self.pick_ids(self.model.live(), picks[: PADDING - 1]), noise])

    def retain_ids(self, ids: list[int]) -> None:
        self.table = bt.retain(self.table, padded(ids))
        by_id = {self.ids[block]: block for block in self.model.live()}
        self.model.retained += [by_id[block_id] for block_id in ids if block_id in by_id]

    @rule(picks=some_blocks, noise=st.integers(-2, NUM_BLOCKS + 1))
    def drop(self, picks: list[int], noise: int) -> None:
        twice = self.pick_ids(self.model.retained, picks[:2]) * 2
        self.drop_ids([*twice, *self.pick_ids(self.model.live(), picks[:1]), noise])

    def drop_ids(self, ids: list[int]) -> None:
        self.table = bt.drop(self.table, padded(ids))
        for block_id in ids:
            block = next((b for b in self.model.retained if self.ids[b] == block_id), None)
            if block is not None:
                self.model.retained.remove(block)

    @rule(rows=st.permutations(range(NUM_ROWS)), kept=st.integers(0, MAX_BLOCKS - 1))
    def outlive_a_row(self, rows: list[int], kept: int) -> None:
        """What becomes of a cached prefix: another row starts from some of it, and all of it leaves the cache."""
        row, heir, late = rows[:3]
        chain, tokens = list(self.model.rows[row].blocks), self.model.rows[row].tokens
        ids = {block: self.ids[block] for block in chain if block}
        length = min(len(tokens), kept * self.block_size)
        self.retain_ids(list(ids.values()))
        self.release({row})
        self.start_rows((heir, -1), [self.named(chain[:kept]), []], [length, 0])
        self.model.adopt(heir, chain[:kept], length)
        self.drop_ids(list(ids.values()))
        gone = [block_id for block, block_id in ids.items() if not self.model.holders(block)]
        if gone:
            self.start_rows((late, -1), [gone[:1], []], [1, 0])  # too late: it is left out

    def named(self, chain: list[Block | None]) -> list[int]:
        return [self.ids[block] if block else bt.NULL_BLOCK for block in chain]

    def pick_ids(self, blocks: list[Block], picks: list[int]) -> list[int]:
        return [self.ids[blocks[pick % len(blocks)]] for pick in picks] if blocks else []

    @rule(rows=two_rows, sounds=st.sampled_from([(True, True), (False, True), (True, False)]), data=st.data())
    def adopt(self, rows: tuple[int, int], sounds: tuple[bool, bool], data: st.DataObject) -> None:
        chains, lengths, plans = [], [], {}
        for row, sound in zip(rows, sounds, strict=True):
            chain, length = self.draw_chain(data)
            if sound and 0 <= row < NUM_ROWS:
                plans[row] = (chain, length)
            ids, length = (self.named(chain), length) if sound else self.spoil(self.named(chain), length, data)
            chains.append(ids)
            lengths.append(length)
        self.start_rows(rows, chains, lengths)
        for row, (chain, length) in plans.items():
            self.model.adopt(row, chain, length)

    def start_rows(self, rows: tuple[int, int], chains: list[list[int]], lengths: list[int]) -> None:
        block_ids = np.full((2, MAX_BLOCKS), NUM_BLOCKS + 3)  # past the tokens' blocks anything may stand
        for line, ids in zip(block_ids, chains, strict=True):
            line[: len(ids)] = ids
        self.table = bt.adopt(
            self.table, jnp.array(rows, jnp.int32), jnp.array(block_ids, jnp.int32), jnp.array(lengths, jnp.int32)
        )

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
        if num_free:
            block_id = int(np.asarray(self.table.free_blocks)[num_free - 1])
            wrongs.insert(0, ([*ids[:-1], block_id], max(length, 1)))
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
        assert sorted(self.ids.values()) == list(range(1, used + 1)), "the used blocks are not at the front"
        assert all(src > used for src in moves), "a block was moved that was at the front already"

    @invariant()
    def agrees(self) -> None:
        entries, seq_lens = np.asarray(self.table.block_tables), np.asarray(self.table.seq_lens)
        known: dict[Block, int] = {block: self.ids[block] for block in self.model.live() if block in self.ids}
        for row, expected in enumerate(self.model.rows):
            assert seq_lens[row] == len(expected.tokens), f"row {row} has {seq_lens[row]} tokens"
            for block, block_id in zip(expected.blocks, entries[row].tolist(), strict=False):
                assert (block is None) == (block_id == bt.NULL_BLOCK), f"row {row} holds too much, or too little"
                if block is not None:
                    assert known.setdefault(block, block_id) == block_id, f"row {row} holds another block"
            held = [
                self.pool[entries[row, at // self.block_size], at % self.block_size]
                for at in range(len(expected.tokens))
            ]
            assert held == expected.tokens, f"row {row} reads {held}, not {expected.tokens}"
        assert len(set(known.values())) == len(known), "two blocks of the model share an id"
        self.ids = known
        counts = np.asarray(self.table.ref_counts)
        assert {block_id: counts[block_id] for block_id in known.values()} == {
            self.ids[block]: self.model.holders(block) for block in known
        }, "a count is not the number of holders"
        assert int(self.table.num_free_blocks) == self.model.num_free(), "a block is lost, or free too early"
        assert (self.pool[bt.NULL_BLOCK] == LOST).all()
        bt.check(self.table, [self.ids[block] for block in self.model.retained])


def padded(ids: list[int]) -> jax.Array:
    return jnp.array(ids + [bt.NULL_BLOCK] * (PADDING - len(ids)), jnp.int32)


def assert_equal_trees(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def run(block_size: int = 2, max_examples: int = 35, steps: int = 30, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    machine = type("Machine", (Machine,), {"block_size": block_size})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            phases=phases,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
