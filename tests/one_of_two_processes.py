"""One of two processes that run one engine on the devices of both: `test_tensor_parallel` starts them.

python one_of_two_processes.py PORT PROCESS_ID FOLDER ["everything"]
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import mesh_models
import mock_engine
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from mesh_models import GREEDY, OPTIONS, PROMPTS
from orbax.checkpoint import multihost

from pagedjax import LLM, RequestOutput, check_parity
from pagedjax.snapshot import folder

SECONDS = 300  # in which one process waits for the other


def plain(outputs: list[RequestOutput]) -> list[Any]:
    return [[(sample.token_ids, sample.cumulative_logprob) for sample in output.outputs] for output in outputs]


def save_and_go_on(llm: LLM, place: pathlib.Path, own_place: pathlib.Path) -> list[Any]:
    """What becomes of requests: left alone, and after a save and a load, without and with K/V."""
    for index, prompt in enumerate(PROMPTS[:2]):
        llm.add_request(str(index), prompt, mesh_models.sampled())
    for _ in range(2):
        llm.step()
    for include_kv in (False, True):
        llm.save_state(place / str(include_kv), include_kv=include_kv)
    folder.PATIENCE = 0.5
    with pytest.raises(OSError, match=r"has written state_0 to .* a file system that all processes share"):
        llm.save_state(own_place)
    kv = [float(np.abs(part).sum()) for part in llm.export_kv("0")]
    ends = [mock_engine.finish(llm)]
    with pytest.raises(OSError, match="processes do not find the same state"):
        llm.load_state(own_place)
    for include_kv in (False, True):
        assert llm.load_state(place / str(include_kv)) == ["0", "1"]
        if include_kv:
            assert kv == [float(np.abs(part).sum()) for part in llm.export_kv("0")]
        ends.append(mock_engine.finish(llm))
    with pytest.raises(FileNotFoundError, match="no folder"):
        llm.load_state(place / "nowhere")
    return [kv, *(plain([end["0"], end["1"]]) for end in ends)]


def run(llm: LLM, place: pathlib.Path, own_place: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = {"sampled": plain(mock_engine.generate(llm, PROMPTS, mesh_models.sampled(2)))}
    found["saved"] = save_and_go_on(llm, place, own_place)
    parity = check_parity(llm, llm.params, PROMPTS)
    assert parity.max_difference < 1e-4
    found["parity"] = parity.differences.tolist()
    llm.update_params(jax.tree.map(np.asarray, mesh_models.split("llama", seed=1)[1]))
    found["new weights"] = plain(mock_engine.generate(llm, PROMPTS, GREEDY))
    return found


def main(port: str, process_id: str, place: str, *what: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(process_id))
    assert jax.local_device_count() == 2
    graphdef, params = mesh_models.split("llama")
    # One process has room for more blocks than the other.
    memory = {"num_blocks": None, "kv_cache_memory_bytes": 2**20 * (1 + int(process_id))}
    mesh = jax.make_mesh((1, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):  # as within a training loop
        llm = LLM(nnx.merge(graphdef, params), mesh=mesh, **OPTIONS | memory)
        # Compiled by both before they first meet, for which gloo gives them half a minute.
        llm.warmup()
        multihost.sync_global_processes("compiled", timeout=SECONDS, processes={0, 1})
        found: dict[str, Any] = {"num_blocks": llm.plan.num_blocks}
        found["greedy"] = plain(mock_engine.generate(llm, PROMPTS, GREEDY))
    if what:
        found |= run(llm, pathlib.Path(place), pathlib.Path(place) / f"of_{process_id}")
    llm.audit()
    with open(pathlib.Path(place) / f"{process_id}.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
