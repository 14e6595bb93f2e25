"""Parameters that a train step has had donated: an error that says so, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import mock_engine
import pytest
from mock_engine import GREEDY, finish, generate, ids
from mock_model import Oracle

from pagedjax import LLM

GONE = "the parameters were donated or deleted; call update_params"


@pytest.fixture
def llm() -> Iterator[LLM]:
    for llm in mock_engine.idle():
        yield llm
        llm.update_params({"salt": jnp.float32(0)}, running="recompute")


def donate(llm: LLM) -> None:
    """What a train step does with the engine's own parameters; own ones, so that no other test misses them."""
    llm.update_params({"salt": jnp.array(0, jnp.float32)}, running="keep")
    train = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * 1, params), donate_argnums=0)
    train(llm.params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(llm.params))


@pytest.mark.parametrize("running", ["recompute", "keep"])
def test_requests_wait_for_other_parameters(llm: LLM, running: str) -> None:
    """As often as one tries: no step was taken, nothing is computed anew on account of it."""
    mock_engine.pace(llm, decode_steps=2)
    llm.add_request("running", [1, 2], GREEDY)
    llm.add_request("aborted", [4], GREEDY)
    llm.step()
    llm.add_request("waiting", [3], GREEDY)
    llm.abort("aborted")
    donate(llm)
    before = llm.stats()
    for _ in range(3):
        with pytest.raises(ValueError, match=GONE):
            llm.step()
    after = llm.stats()
    assert (after.num_running, after.num_waiting, after.num_steps) == (1, 1, before.num_steps)
    assert after.preemptions == before.preemptions
    llm.update_params({"salt": jnp.float32(0)}, running=running)
    outputs = finish(llm)
    assert outputs["aborted"].outputs[0].finish_reason == "abort"
    assert ids(outputs["running"]) == Oracle([1, 2], GREEDY).generate()
    assert ids(outputs["waiting"]) == Oracle([3], GREEDY).generate()


def test_what_has_ended_is_handed_out(llm: LLM) -> None:
    mock_engine.pace(llm, decode_steps=2)
    llm.add_request("aborted", [4], GREEDY)
    llm.step()
    donate(llm)
    llm.abort("aborted")
    (output,) = llm.step()
    assert output.outputs[0].finish_reason == "abort"


def test_generate_leaves_nothing_behind(llm: LLM) -> None:
    llm.add_request("other", [1], GREEDY)
    donate(llm)
    with pytest.raises(ValueError, match=GONE):
        generate(llm, [[2], [3]])
    assert list(llm._engine.requests) == ["other"]
    llm.update_params({"salt": jnp.float32(0)}, running="keep")
    assert ids(finish(llm)["other"]) == Oracle([1], GREEDY).generate()
