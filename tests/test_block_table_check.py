"""`check` finds every way in which a table can contradict itself, and says which."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from small_block_table import grow, ints, new

from pagedjax import block_table as bt

CORRUPTIONS = {
    "ref count too high": ("ref_counts", (1,), 3, "block 1 has ref count 3, but 2 table entries and 0 retained"),
    "a lost block": ("ref_counts", (1,), 0, "block 1 has ref count 0 and is not on the free stack"),
    "free twice": ("free_blocks", (0,), 14, "block 14 is on the free stack 2 times"),
    "free and held": ("free_blocks", (0,), 2, "block 2 is on the free stack with ref count"),
    "null block free": ("free_blocks", (0,), 0, "block 0 is on the free stack"),
    "null block held": ("ref_counts", (0,), 1, "block 0 has ref count 1"),
    "retained unknown": ("retain_counts", (2,), 1, "block 2 is retained 1 times in the table, but 0 times"),
    "negative length": ("seq_lens", (3,), -1, "row 3 has -1 tokens; it can have 0 to 32"),
    "too long": ("seq_lens", (3,), 33, "row 3 has 33 tokens"),
    "length past the blocks": ("seq_lens", (0,), 17, "row 0, entry 3, is the null block between others"),
    "length short of the blocks": ("seq_lens", (0,), 4, "row 0, entry 1, is block"),
    "entry outside the pool": ("block_tables", (0, 1), 16, "row 0, entry 1, is block 16; the pool has 16"),
    "null between": ("block_tables", (0, 1), 0, "row 0, entry 1, is the null block between others"),
    "count past the stack": ("num_free_blocks", (), 16, "num_free_blocks is 16"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_says_what_is_wrong(name: str) -> None:
    field, at, value, message = CORRUPTIONS[name]
    table = bt.fork(grow(new(), 12, 6, 0, 0), ints(-1, -1, 0, -1))
    bt.check(table)
    broken = np.array(getattr(table, field))
    broken[at] = value
    with pytest.raises(bt.BlockTableError, match=re.escape(message)):
        bt.check(dataclasses.replace(table, **{field: jnp.asarray(broken)}))


def test_check_compares_with_what_the_caller_retained() -> None:
    table = bt.retain(grow(new(), 8, 0, 0, 0), ints(1, 1, 0, 0))
    bt.check(table, retained=[1, 1])
    for retained, message in [
        ((), "2 times in the table, but 0"),
        ([1], "but 1 times"),
        ([1, 1, 99], "names block 99"),
    ]:
        with pytest.raises(bt.BlockTableError, match=message):
            bt.check(table, retained=retained)
