"""Do the random tests notice what they are there for? One fault is planted at a time, and they have to fail.

The state machine of `table_machine` is to notice the faults of the block table, and the mirrors of `host_loop` and
`host_device`, as `test_scheduler_random` drives them, those of the host's account. A fault that is not noticed is a
hole in the test, whatever the code does.
"""

from __future__ import annotations

import host_faults
import pytest
import table_faults
from hypothesis import Phase
from table_machine import run
from test_scheduler_random import Driver

from pagedjax import block_table as bt


def drive(seeds: range) -> None:
    """As the tests at random do, with a cache in three cases of four."""
    for seed in seeds:
        driver = Driver(seed, enable_prefix_caching=seed % 4 > 0)
        driver.run(late_aborts=seed % 2 == 0, changes_weights=seed % 3 == 0)


def check_table_fault(monkeypatch: pytest.MonkeyPatch, fault: table_faults.Fault) -> None:
    monkeypatch.setattr(bt, fault.transition, fault.wrong)
    with pytest.raises((AssertionError, bt.BlockTableError)):
        run(max_examples=100, phases=(Phase.generate,))  # what fails first will do: no smaller example is wanted


@pytest.mark.parametrize("fault", table_faults.FAULTS, ids=str)
def test_the_machine_notices(monkeypatch: pytest.MonkeyPatch, fault: table_faults.Fault) -> None:
    check_table_fault(monkeypatch, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", table_faults.FURTHER_FAULTS, ids=str)
def test_the_machine_notices_more(monkeypatch: pytest.MonkeyPatch, fault: table_faults.Fault) -> None:
    check_table_fault(monkeypatch, fault)


def test_every_transition_has_a_fault() -> None:
    reads = {"NULL_BLOCK", "BlockCopies", "BlockTable", "BlockTableError", "check", "create"}
    assert {fault.transition for fault in table_faults.FAULTS} == set(bt.__all__) - reads


@pytest.mark.parametrize("fault", host_faults.FAULTS, ids=str)
def test_the_mirror_notices(monkeypatch: pytest.MonkeyPatch, fault: host_faults.Fault) -> None:
    monkeypatch.setattr(fault.owner, fault.name, fault.planted())
    with pytest.raises(AssertionError):
        drive(range(120))
