"""What a request gives back: plain values, safe to keep after the engine has moved on."""

from __future__ import annotations

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]

# One entry a token: the top k token ids and the token itself, each with its natural-log probability.
Logprobs = list[dict[int, float]]
PromptLogprobs = list[dict[int, float] | None]


@dataclasses.dataclass
class CompletionOutput:
    """One sample of a request.

    Attributes:
        index: which of the `n` samples, or the rank among a search's completions.
        text: the text so far; of a finished sample all of it, cut at a stop string.
        token_ids: every token that was generated, the end token included.
        logprobs: per token, from the raw logits (before penalties, bias, temperature and cuts), or None.
        cumulative_logprob: the sum over the sampled tokens, or None where no logprobs were asked for.
        finish_reason: "stop" (an end token, stop token or stop string), "length", "abort", "error"; None while running.
        stop_reason: the stop string or stop token id that ended it; None for end tokens of the model and other reasons.
        sampled_logprobs: per token, under the processed distribution that it was drawn from, or None.
        weights_versions: per token, of the weights that drew it (`LLM.weights_version`); empty for a beam search.
        kept_masses: per token, the probability that top_k, top_p and min_p kept of it before renormalising, or None.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    sampled_logprobs: list[float] | None = None
    kept_masses: list[float] | None = None
    weights_versions: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Score:
    """How likely a continuation is after a prompt.

    Attributes:
        logprob: natural-log probability of the whole continuation, the sum of `token_logprobs`.
        is_greedy: whether every token of it is the most likely one at its place.
        token_logprobs: one value a token, from the raw logits.
        token_ids: the continuation as the model sees it.
    """

    logprob: float
    is_greedy: bool
    token_logprobs: list[float]
    token_ids: list[int]


@dataclasses.dataclass
class RequestMetrics:
    """Times of a request in seconds on `time.monotonic`'s clock; None until it happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclasses.dataclass
class RequestOutput:
    """A request as it stands: its prompt and all its samples.

    Attributes:
        request_id: as given.
        prompt: the prompt's text, or None where token ids were given.
        prompt_token_ids: the prompt as the model sees it.
        prompt_logprobs: one entry a prompt token, the first None, or None if not asked for.
        outputs: one CompletionOutput a sample.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
        metrics: times.
        scores: of the continuations, once all are known, where the request was to score them (`LLM.score` returns
            them; of a request that `LLM.load_state` has brought they come out here).
        finished: whether every sample has ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    scores: list[Score] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)
