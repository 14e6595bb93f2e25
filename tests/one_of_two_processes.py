"""One of two processes that run one engine on the devices of both: `test_tensor_parallel` starts them.

python one_of_two_processes.py PORT PROCESS_ID OUTPUT_FILE
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import mesh_models
import mock_engine
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from mesh_models import GREEDY, OPTIONS, PROMPTS

from pagedjax import LLM, RequestOutput


def plain(outputs: list[RequestOutput]) -> list[Any]:
    return [[(sample.token_ids, sample.cumulative_logprob) for sample in output.outputs] for output in outputs]


def main(port: str, process_id: str, output_file: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(process_id))
    assert jax.local_device_count() == 2
    graphdef, params = mesh_models.split("llama")
    # One process has room for more blocks than the other.
    memory = {"num_blocks": None, "kv_cache_memory_bytes": 2**20 * (1 + int(process_id))}
    llm = LLM(nnx.merge(graphdef, params), mesh=Mesh(np.array(jax.devices()), ("devices",)), **OPTIONS | memory)
    found: dict[str, Any] = {"num_blocks": llm.plan.num_blocks}
    found["greedy"] = plain(mock_engine.generate(llm, PROMPTS, GREEDY))
    found["sampled"] = plain(mock_engine.generate(llm, PROMPTS, mesh_models.sampled(2)))
    llm.add_request("a", PROMPTS[0], GREEDY)
    llm.step()
    found["kv"] = [float(np.abs(part).sum()) for part in llm.export_kv("a")]
    mock_engine.finish(llm)
    llm.update_params(jax.tree.map(np.asarray, mesh_models.split("llama", seed=1)[1]))
    found["new weights"] = plain(mock_engine.generate(llm, PROMPTS, GREEDY))
    llm.audit()
    with open(output_file, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
