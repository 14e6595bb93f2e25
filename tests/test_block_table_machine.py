"""The block table against a plain Python allocator, over random sequences of every transition.

Loops are cut to 4 lanes a turn, so that they turn more than once.
"""

from collections.abc import Iterator

import pytest
from table_machine import run

from pagedjax import _block_sharing, _block_state
from pagedjax import block_table as bt


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


def test_table_follows_the_model() -> None:
    run()


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_table_follows_the_model_for_long(block_size: int) -> None:
    run(block_size, max_examples=50, steps=50)
