"""After `warmup` nothing is compiled any more, whatever is asked for: every program is counted, eager ones too."""

from __future__ import annotations

import random

import mock_model
from flax import nnx
from random_requests import random_params, random_search

from pagedjax import LLM, Decoder, ModelConfig

CONFIG = ModelConfig(
    family="llama",
    vocab_size=mock_model.VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)


def test_200_mixed_requests_compile_nothing(compiled: list[float]) -> None:
    """Samples, proposals, logprobs of all kinds, prefixes, preemption and new weights in a short pool; at the end a
    search and scores."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    llm = LLM(
        model,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_blocks=40,
        block_size=8,
        max_model_len=96,
        strict_compile=True,
        num_speculative_tokens=2,
    )
    llm.warmup()
    assert compiled, "the listener hears nothing"
    compiled.clear()
    rng = random.Random(0)
    begin = [rng.randrange(mock_model.VOCAB) for _ in range(20)]
    finished = 0
    for index in range(200):
        own = [rng.randrange(mock_model.VOCAB) for _ in range(rng.randint(1, 40))]
        llm.add_request(str(index), begin[: rng.randint(0, 20)] + own, random_params(rng))
        if index % 50 == 49:
            llm.update_params(nnx.state(model), running="recompute")
        for _ in range(rng.randint(0, 3)):
            finished += sum(output.finished for output in llm.step())
    while llm.has_unfinished_requests():
        finished += sum(output.finished for output in llm.step())
    assert finished == 200
    assert llm.stats().preemptions
    llm.beam_search(begin, random_search(rng), use_tqdm=False)
    assert len(llm.score(begin, [[1, 2], [3]])) == 2
    llm.defragment()
    assert compiled == []
