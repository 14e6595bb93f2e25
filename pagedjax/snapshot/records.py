"""Requests and outputs as JSON, with their long lists in `Numbers`; and requests made again from it.

A request is made by the engine's own `RequestMaker`, which refuses what does not fit this engine, and then gets what
it had: seeds, tokens, log-probabilities. Its text is made from the tokens again. A beam search starts over, and comes
to the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pagedjax.beam_search import BeamSearchParams
from pagedjax.new_request import RequestMaker
from pagedjax.outputs import CompletionOutput, RequestMetrics, RequestOutput, Score
from pagedjax.request import Request, Sequence
from pagedjax.sampling_params import SamplingParams
from pagedjax.snapshot.numbers import Numbers

Record = dict[str, Any]

SAMPLED, SCORED, SEARCHED = "sampled", "scored", "searched"

# Of RequestMetrics: on a clock that another process does not have.
TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "finished_time")


# Requests


def describe_request(request: Request, numbers: Numbers, now: float) -> Record:
    """An unfinished request.

    Args:
        request: what to describe.
        numbers: takes its lists.
        now: on `time.monotonic`'s clock.
    """
    kind = SEARCHED if request.beams is not None else SCORED if request.sequences[0].continuation else SAMPLED
    record = {
        "request_id": request.request_id,
        "kind": kind,
        "prompt": request.prompt,
        "prompt_ids": numbers.put_ints(request.prompt_ids),
        "num_cached_tokens": request.num_cached_tokens,
        "metrics": _describe_metrics(request.metrics, now),
    }
    if request.beams is not None:
        search = {"params": dataclasses.asdict(request.beams.params), "end_ids": sorted(request.beams.end_ids)}
        return record | search
    sequences = [_describe_sequence(sequence, numbers) for sequence in request.sequences]
    return record | {"params": _describe_params(request.params), "sequences": sequences}


def remake_request(
    record: Record, numbers: Numbers, maker: RequestMaker, now: float, check_beams: Callable[[Request], None]
) -> Request:
    """A described request, ready to be queued.

    Args:
        record: what `describe_request` gave.
        numbers: has its lists.
        maker: of the engine's requests.
        now: on `time.monotonic`'s clock.
        check_beams: raises ValueError for a beam search that the engine has no room for.

    Raises:
        ValueError: this engine cannot go on with it; the request is named.
    """
    request_id = record["request_id"]
    try:
        request = _make(record, numbers, maker)
        if request.beams is not None:
            check_beams(request)
    except ValueError as error:
        raise ValueError(f"request {request_id!r} cannot go on in this engine: {error}") from error
    request.metrics = _remake_metrics(record["metrics"], now)
    request.num_cached_tokens = record["num_cached_tokens"]
    return request


def _make(record: Record, numbers: Numbers, maker: RequestMaker) -> Request:
    request_id, prompt, prompt_ids = record["request_id"], record["prompt"], numbers.ints(record["prompt_ids"])
    if record["kind"] == SEARCHED:
        return _make_search(record, prompt_ids, maker)
    params = _remake_params(record["params"])
    if record["kind"] == SCORED:
        continuations = [numbers.ints(sequence["continuation"]) for sequence in record["sequences"]]
        request = maker.scored(request_id, prompt_ids, continuations, params.cache_salt)
    else:
        request = maker.sampled(request_id, prompt, prompt_ids, params)
    for sequence, described in zip(request.sequences, record["sequences"], strict=True):
        _continue(sequence, described, numbers, maker)
    return request


def _make_search(record: Record, prompt_ids: list[int], maker: RequestMaker) -> Request:
    params = BeamSearchParams(**record["params"])
    request = maker.searched(record["request_id"], record["prompt"], prompt_ids, params)
    assert request.beams is not None
    if record["end_ids"] != (end_ids := sorted(request.beams.end_ids)):
        raise ValueError(f"its completions end at the tokens {record['end_ids']}, and this engine's at {end_ids}")
    _check_end(len(prompt_ids) + params.max_tokens, request.sequences[0])
    return request


def _describe_params(params: SamplingParams) -> Record:
    bias = params.logit_bias
    return dataclasses.asdict(params) | {"logit_bias": None if bias is None else [list(pair) for pair in bias.items()]}


def _remake_params(record: Record) -> SamplingParams:
    bias = record["logit_bias"]  # JSON has no integers as keys
    return SamplingParams(**record | {"logit_bias": None if bias is None else dict(bias)})


# Sequences


def _describe_sequence(sequence: Sequence, numbers: Numbers) -> Record:
    return {
        "seed": sequence.seed,
        "stop_ids": sorted(sequence.stop_ids),
        "end_len": sequence.end_len,
        "continuation": numbers.put_ints(sequence.continuation),
        "scores": numbers.put_logprobs(sequence.scores),
        "output_ids": numbers.put_ints(sequence.output_ids),
        "logprobs": numbers.put_logprobs(sequence.logprobs),
        "cumulative_logprob": sequence.cumulative_logprob,
        "sampled_logprobs": numbers.put_floats(sequence.sampled_logprobs),
        "kept_masses": numbers.put_floats(sequence.kept_masses),
        "weights_versions": numbers.put_ints(sequence.weights_versions),
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "text": sequence.text.text,
    }


def _continue(sequence: Sequence, record: Record, numbers: Numbers, maker: RequestMaker) -> None:
    """A fresh sequence gets what the described one had."""
    _check_end(record["end_len"], sequence)
    sequence.seed, sequence.end_len = record["seed"], record["end_len"]
    sequence.stop_ids = frozenset(record["stop_ids"])
    _push_tokens(sequence, record, numbers.ints(record["output_ids"]), maker)
    sequence.scores = [entry for entry in numbers.logprobs(record["scores"]) if entry is not None]
    sequence.logprobs = [entry for entry in numbers.logprobs(record["logprobs"]) if entry is not None]
    sequence.cumulative_logprob = record["cumulative_logprob"]
    sequence.sampled_logprobs = numbers.floats(record["sampled_logprobs"])
    sequence.kept_masses = numbers.floats(record["kept_masses"])
    sequence.weights_versions = numbers.ints(record["weights_versions"])


def _check_end(end_len: int, sequence: Sequence) -> None:
    if end_len > sequence.end_len:
        raise ValueError(
            f"it may become {end_len} tokens long, and here it would be cut at {sequence.end_len}; raise max_model_len"
        )


def _push_tokens(sequence: Sequence, record: Record, output_ids: list[int], maker: RequestMaker) -> None:
    """Takes the tokens again one by one, as when they were drawn, which makes their text, and checks that it is the
    same: it has been shown to somebody."""
    if output_ids:
        maker.check_ids(output_ids, "the output")
    reason = record["finish_reason"]
    for place, token in enumerate(output_ids, 1):
        ends = place == len(output_ids)
        stopped = ends and reason == "stop" and token in sequence.stop_ids
        sequence.push(token, stopped=stopped, at_length=ends and reason == "length")
    if reason is not None and not sequence.finished:
        sequence.finish(reason)
    expected = (reason, record["stop_reason"], record["text"])
    found = (sequence.finish_reason, sequence.stop_reason, sequence.text.text)
    if found != expected:
        raise ValueError(
            f"the text of its sample {sequence.index}, and why it ended, were {expected} and come out as {found}; use "
            "the tokenizer that the state was saved with"
        )


# Outputs


def describe_output(output: RequestOutput, numbers: Numbers, now: float) -> Record:
    """What has come out of the engine, and nobody has taken."""

    def floats(values: list[float] | None) -> Any:
        return None if values is None else numbers.put_floats(values)

    def logprobs(entries: Any) -> Any:
        return None if entries is None else numbers.put_logprobs(entries)

    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": numbers.put_ints(output.prompt_token_ids),
        "prompt_logprobs": logprobs(output.prompt_logprobs),
        "num_cached_tokens": output.num_cached_tokens,
        "metrics": _describe_metrics(output.metrics, now),
        "outputs": [
            vars(sample)
            | {
                "token_ids": numbers.put_ints(sample.token_ids),
                "logprobs": logprobs(sample.logprobs),
                "sampled_logprobs": floats(sample.sampled_logprobs),
                "kept_masses": floats(sample.kept_masses),
                "weights_versions": numbers.put_ints(sample.weights_versions),
            }
            for sample in output.outputs
        ],
        "scores": None if output.scores is None else [dataclasses.asdict(score) for score in output.scores],
    }


def remake_output(record: Record, numbers: Numbers, now: float) -> RequestOutput:
    """The described output."""

    def floats(span: Any) -> list[float] | None:
        return None if span is None else numbers.floats(span)

    def logprobs(spans: Any) -> Any:
        return None if spans is None else numbers.logprobs(spans)

    samples = [
        CompletionOutput(
            **sample
            | {
                "token_ids": numbers.ints(sample["token_ids"]),
                "logprobs": logprobs(sample["logprobs"]),
                "sampled_logprobs": floats(sample["sampled_logprobs"]),
                "kept_masses": floats(sample["kept_masses"]),
                "weights_versions": numbers.ints(sample["weights_versions"]),
            }
        )
        for sample in record["outputs"]
    ]
    changed = {
        "prompt_token_ids": numbers.ints(record["prompt_token_ids"]),
        "prompt_logprobs": logprobs(record["prompt_logprobs"]),
        "metrics": _remake_metrics(record["metrics"], now),
        "outputs": samples,
        "scores": None if record["scores"] is None else [Score(**score) for score in record["scores"]],
    }
    return RequestOutput(**record | changed)


# Times


def _describe_metrics(metrics: RequestMetrics, now: float) -> Record:
    """How long ago everything happened."""
    ages = {name: None if (time := getattr(metrics, name)) is None else now - time for name in TIMES}
    return ages | {"num_preemptions": metrics.num_preemptions}


def _remake_metrics(record: Record, now: float) -> RequestMetrics:
    times = {name: None if (age := record[name]) is None else now - age for name in TIMES}
    return RequestMetrics(**record | times)
