"""The whole engine on a real model, against transformers' greedy tokens and logprobs in float32.

The reference continues past end tokens; a token must be the reference's wherever the margin between the two most likely
ones is above 1e-3, and where it is not the comparison of that prompt ends at a difference.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import hf_files
import pytest

from pagedjax import LLM, BeamSearchParams, RequestOutput, SamplingParams
from pagedjax.loaders import gguf
from pagedjax.text import Tokenizer

DATA = pathlib.Path(__file__).parent / "data"
REFERENCE = json.loads((DATA / "smollm2_greedy.json").read_text())["prompts"]
BEAMS = json.loads((DATA / "smollm2_beam.json").read_text())["cases"]
MARGIN = 1e-3
LOGPROB_TOLERANCE = 2e-3
PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=5, prompt_logprobs=0)


def assert_matches(output: RequestOutput, reference: dict[str, Any]) -> None:
    completion = output.outputs[0]
    assert len(completion.token_ids) == 64
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    for step, want in enumerate(reference["output_token_ids"]):
        if completion.token_ids[step] != want:
            assert reference["margins"][step] <= MARGIN, f"{reference['name']} differs at step {step}"
            break
        top = completion.logprobs[step]
        for token, logprob in reference["top5_logprobs"][step]:
            if token in top:
                assert top[token] == pytest.approx(logprob, abs=LOGPROB_TOLERANCE)
        assert sum(token in top for token, _ in reference["top5_logprobs"][step]) >= 4  # the fifth may be a near tie
    assert output.prompt_logprobs[0] is None
    given = [entry[token] for entry, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)]
    assert given == pytest.approx(reference["prompt_logprobs"], abs=LOGPROB_TOLERANCE)


def test_all_at_once(smollm2: LLM) -> None:
    outputs = smollm2.generate([r["prompt_token_ids"] for r in REFERENCE], PARAMS, use_tqdm=False)
    for output, reference in zip(outputs, REFERENCE, strict=True):
        assert_matches(output, reference)
    smollm2.audit()


def test_text_in_text_out(smollm2: LLM) -> None:
    reference = REFERENCE[0]
    output = smollm2.chat(reference["messages"], SamplingParams(temperature=0.0, max_tokens=64))[0]
    assert output.prompt_token_ids == reference["prompt_token_ids"]
    assert output.outputs[0].text == reference["output_text_until_eos"]
    assert output.outputs[0].finish_reason == "stop"


def test_stream_is_the_whole_text(smollm2: LLM) -> None:
    reference = REFERENCE[3]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, skip_special_tokens=False)
    deltas = list(smollm2.stream(reference["prompt_text"], params))
    assert len(deltas) > 4
    assert "".join(deltas) == smollm2.tokenizer.decode(reference["output_token_ids"], skip_special_tokens=False)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case['prompt']}-{case['early_stopping']}",
            marks=() if case["prompt"] == "chat_capital" else pytest.mark.slow,
        )
        for case in BEAMS
    ],
)
def test_beam_search_is_that_of_transformers(smollm2: LLM, case: dict[str, Any]) -> None:
    options = {name: case[name] for name in ("width", "max_tokens", "length_penalty", "early_stopping")}
    prompt = next(r["prompt_token_ids"] for r in REFERENCE if r["name"] == case["prompt"])
    (output,) = smollm2.beam_search(prompt, BeamSearchParams(**options), use_tqdm=False)
    for found, expected in zip(output.outputs, case["sequences"], strict=True):
        assert found.token_ids == expected["token_ids"]
        assert found.cumulative_logprob is not None
        score = found.cumulative_logprob / len(found.token_ids) ** case["length_penalty"]
        assert score == pytest.approx(expected["score"], abs=LOGPROB_TOLERANCE)


@pytest.mark.slow  # three minutes; chunks of 64 are above, and sequences that give way in the mock model's tests
def test_chunks_of_sixteen_and_a_pool_that_preempts(smollm2_path: pathlib.Path) -> None:
    """The longest request comes first and the pool has little beside it, so the others have to give way to it."""
    llm = LLM.load(
        smollm2_path, max_num_seqs=4, max_num_batched_tokens=16, num_blocks=46, max_model_len=704, batch_invariant=True
    )
    references = sorted(REFERENCE, key=lambda r: -len(r["prompt_token_ids"]))
    outputs = llm.generate([r["prompt_token_ids"] for r in references], PARAMS, use_tqdm=False)
    for output, reference in zip(outputs, references, strict=True):
        assert_matches(output, reference)
    assert llm.stats().num_preemptions > 0
    assert llm.stats().num_compiled_programs == 2
    llm.audit()


@pytest.mark.slow
def test_from_a_hugging_face_folder(smollm2_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The same weights as three safetensors shards, with the tokenizer's files beside them."""
    config, params = gguf.load(smollm2_path)
    hf_files.write_llama(tmp_path, config, params, num_shards=3)
    Tokenizer.from_gguf(smollm2_path).save(tmp_path)
    llm = LLM.load(tmp_path, max_num_seqs=8, max_num_batched_tokens=64, batch_invariant=True)
    prompts = [r["prompt_text"] for r in REFERENCE]
    for output, reference in zip(llm.generate(prompts, PARAMS, use_tqdm=False), REFERENCE, strict=True):
        assert output.prompt_token_ids == reference["prompt_token_ids"]
        assert_matches(output, reference)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("attention", ["xla", "reference"])
def test_one_by_one(smollm2_path: pathlib.Path, block_size: int, attention: str) -> None:
    llm = LLM.load(
        smollm2_path,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        block_size=block_size,
        max_model_len=704,
        attention=attention,
        batch_invariant=True,
    )
    for reference in REFERENCE:
        assert_matches(llm.generate(reference["prompt_token_ids"], PARAMS, use_tqdm=False)[0], reference)
