"""pagedjax.wait_queue against a sorted list."""

from __future__ import annotations

import random

import pytest
from host_loop import Loop

from pagedjax.request import Sequence
from pagedjax.wait_queue import WaitQueue


def some_sequences(count: int) -> list[Sequence]:
    loop = Loop()
    return [loop.add([1, 2, 3], max_tokens=1) for _ in range(count)]


def test_it_is_a_list_sorted_by_arrival() -> None:
    rng = random.Random(0)
    out, queue = some_sequences(40), WaitQueue()
    gone: list[Sequence] = []
    inside: list[Sequence] = []
    for _ in range(2000):
        move = rng.choice(["add", "add", "pop", "pop", "remove"])
        if move == "add" and out:
            inside.append(out.pop(rng.randrange(len(out))))
            queue.add(inside[-1])
        elif move == "pop" and inside:
            inside.sort(key=lambda sequence: sequence.arrival)
            assert queue.first is inside[0]
            assert queue.pop() is inside[0]
            out.append(inside.pop(0))
        elif move == "remove" and inside and len(gone) < 20:
            gone.append(inside.pop(rng.randrange(len(inside))))
            queue.remove(gone[-1])
        for sequence in gone:
            queue.remove(sequence)  # it does not wait: nothing happens
        assert list(queue) == sorted(inside, key=lambda sequence: sequence.arrival)
        assert len(queue) == len(inside)
        assert all(sequence in queue for sequence in inside)
        assert not any(sequence in queue for sequence in out + gone)
    assert len(gone) == 20


def test_an_empty_queue_has_no_first() -> None:
    (sequence,), queue = some_sequences(1), WaitQueue()
    queue.add(sequence)
    queue.remove(sequence)
    with pytest.raises(IndexError):
        queue.pop()
    assert not queue
