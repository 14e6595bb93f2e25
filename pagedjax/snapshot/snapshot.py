"""What an engine's state is, and how an idle engine takes it over: all of it, or nothing.

Without K/V every sequence waits, and is computed again from its tokens; the draws are functions of (seed, sample index,
position), so it goes on as it would have. With K/V the rows go on where they were.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pagedjax.new_request import RequestMaker
from pagedjax.request import Request, Sequence
from pagedjax.snapshot import kv
from pagedjax.snapshot.kv import HeldKV
from pagedjax.snapshot.numbers import Numbers
from pagedjax.snapshot.records import describe_output, describe_request, remake_output, remake_request

if TYPE_CHECKING:
    from pagedjax.engine import Engine
    from pagedjax.outbox import Outbox


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of an engine between two steps.

    Attributes:
        content: JSON: the requests, their sequences in order of arrival, outputs not yet handed out, and counters.
        numbers: the long lists of it.
        blocks: raw K/V, see `HeldKV.blocks`; empty where none was asked for.
    """

    content: dict[str, Any]
    numbers: Numbers
    blocks: list[np.ndarray] = dataclasses.field(default_factory=list)


def take(engine: Engine, maker: RequestMaker, outbox: Outbox, *, include_kv: bool) -> Snapshot:
    """The state of an engine, which goes on as if nothing had happened.

    Args:
        engine: between two steps.
        maker: of its requests.
        outbox: of its outputs.
        include_kv: whether K/V of the running rows belongs to it.

    Raises:
        ValueError: the program has several processes, and they do not all run this engine.
    """
    _check_processes(engine)
    numbers, now = Numbers(), time.monotonic()
    engine.wait()
    held = kv.read(engine.runner, engine.scheduler.running) if include_kv else None
    content = {
        "weights_version": engine.scheduler.ledger.weights_version,
        "num_made": maker.num_made,
        "requests": [describe_request(request, numbers, now) for request in engine.requests.values()],
        "queue": [[s.request.request_id, s.index] for s in _in_order_of_arrival(engine)],
        "outputs": [describe_output(output, numbers, now) for output in outbox.held],
        "kv": None if held is None else held.describe(numbers),
    }
    return Snapshot(content, numbers, [] if held is None else held.blocks)


def restore(snapshot: Snapshot, engine: Engine, maker: RequestMaker, outbox: Outbox, *, include_kv: bool) -> list[str]:
    """Makes the state that of an idle engine, whose cached blocks are forgotten.

    Args:
        snapshot: of an engine whose sizes may have been others.
        engine: has nothing to do and nothing to hand out.
        maker: of its requests.
        outbox: of its outputs.
        include_kv: whether to use K/V, where the state has it.

    Returns:
        The ids of the unfinished requests.

    Raises:
        ValueError: the engine is not idle, or cannot go on with a request or with the K/V; then it is as it was.
    """
    if engine.has_unfinished() or outbox.held:
        raise ValueError(
            f"{len(engine.requests)} requests are unfinished, or outputs wait to be handed out; load a state into an "
            "engine that has nothing to do"
        )
    num_made, now = maker.num_made, time.monotonic()
    try:
        content, numbers = snapshot.content, snapshot.numbers
        check_beams = engine.scheduler.check_beams_fit
        requests = {
            record["request_id"]: remake_request(record, numbers, maker, now, check_beams)
            for record in content["requests"]
        }
        queue = [requests[request_id].sequences[index] for request_id, index in content["queue"]]
        outputs = [remake_output(record, numbers, now) for record in content["outputs"]]
        held = None
        if include_kv and content["kv"] is not None:
            held = HeldKV.of(content["kv"], snapshot.blocks, numbers)
            kv.check(held, engine.runner, engine.scheduler)
        weights_version, saved_num_made = content["weights_version"], content["num_made"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the state is damaged, or of another version of pagedjax: {error!r}") from error
    finally:
        maker.num_made = num_made
    _take_over(engine, requests, queue, weights_version, held)
    outbox.bring(outputs)
    maker.num_made = saved_num_made
    engine.observer.deliver()
    return list(requests)


def _check_processes(engine: Engine) -> None:
    mesh, num_processes = engine.runner.config.mesh, jax.process_count()
    num_running = 1 if mesh is None else len({device.process_index for device in mesh.devices.flat})
    if num_running != num_processes:
        raise ValueError(
            f"this program has {num_processes} processes, and {num_running} of them run this engine; a state can only "
            "be saved of an engine that all of them run, on a mesh of all their devices"
        )


def _in_order_of_arrival(engine: Engine) -> list[Sequence]:
    """The unfinished sequences; of a beam search the first, as it starts over."""
    sequences = [
        sequence
        for request in engine.requests.values()
        for sequence in (request.sequences if request.beams is None else request.sequences[:1])
        if not sequence.finished
    ]
    return sorted(sequences, key=lambda sequence: sequence.arrival)


def _take_over(
    engine: Engine, requests: dict[str, Request], queue: list[Sequence], weights_version: int, held: HeldKV | None
) -> None:
    """What has been checked becomes the engine's; nothing of what its device held is left."""
    engine.scheduler.reset()
    engine.runner.reset()
    if held is not None:
        kv.place_blocks(held, engine.runner)
    engine.scheduler.ledger.weights_version = weights_version
    engine.requests |= requests
    if held is None:
        for sequence in queue:
            engine.scheduler.add(sequence)
    else:
        kv.resume(held, queue, engine.runner, engine.scheduler)
    for request in requests.values():
        engine.observer.added(request)
