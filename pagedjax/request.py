"""A request and its sequences on the host: what was asked, what has been computed, how it ended.

A request with `n` samples has n sequences, one that scores has one for each continuation, a beam search one for each
beam; all begin with the prompt. A sequence is one notion for prefill and decode: `num_computed` tokens have K/V in the
pool and catch up with `num_tokens`, the tokens that are known.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

from pagedjax.beam_search import Beam, BeamSearch
from pagedjax.block import Block, BlockKey
from pagedjax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    Score,
)
from pagedjax.sampling_params import SamplingParams
from pagedjax.text import OutputText

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sample of a request, or one continuation to be scored.

    `num_computed` includes tokens of steps in flight; it falls back to 0 on preemption, when the row and its blocks are
    given up and everything is recomputed that the prefix cache has not kept.
    """

    request: Request
    index: int  # which sample of the request
    seed: int
    stop_ids: frozenset[int]  # end tokens (unless ignored) and stop_token_ids
    end_len: int  # num_tokens at which the sequence ends by length
    text: OutputText
    continuation: list[int] = dataclasses.field(default_factory=list)  # tokens after the prompt that are to be scored
    scores_from: int | None = None  # position of the first known token whose logprob is wanted; None: of none
    scores: Logprobs = dataclasses.field(default_factory=list)  # of the known tokens from there on
    output_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: Logprobs = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    sampled_logprobs: list[float] = dataclasses.field(default_factory=list)
    kept_masses: list[float] = dataclasses.field(default_factory=list)
    weights_versions: list[int] = dataclasses.field(default_factory=list)  # that drew each output token
    row: int | None = None  # the batch row while running
    epoch: int = 0  # counts the rows given up
    num_computed: int = 0
    arrival: int = 0  # its place among all sequences; the scheduler serves in this order
    blocks: list[Block | None] = dataclasses.field(default_factory=list)  # while it has a row; None: behind the window
    weights_version: int = 0  # of the weights its blocks were computed with
    keys: list[BlockKey] = dataclasses.field(default_factory=list)  # of its leading full blocks, as far as asked for
    keys_version: int = 0  # of the weights those keys name
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    # What is wanted is asked in every step, but only once the sequence is queued, and then it does not change.

    @functools.cached_property
    def wants_logprobs(self) -> bool:
        """Of any kind, of drawn tokens or of known ones."""
        params = self.params
        return params.logprobs is not None or params.sampled_logprobs or self.scores_from is not None

    @functools.cached_property
    def wants_ids_only(self) -> bool:
        """Whether of its tokens nothing is wanted but their ids."""
        return not self.wants_logprobs and self.request.beams is None and not self.text.makes_text

    @property
    def given_ids(self) -> list[int]:
        """The tokens that are not drawn: the prompt, and a continuation that is to be scored."""
        return self.request.prompt_ids + self.continuation

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt, a continuation but for its last token, which nothing follows, and the output."""
        return len(self.request.prompt_ids) + max(len(self.continuation) - 1, 0) + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens without K/V: 1 for a row that decodes."""
        return self.num_tokens - self.num_computed

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose K/V may come from elsewhere: all but the last, whose logits are drawn from, and none
        that stands before a prompt logprob still to be computed."""
        return min(self.num_tokens, self.next_score or self.num_tokens) - 1

    @property
    def next_score(self) -> int | None:
        """Position of the next known token whose logprob is wanted; None when there is none left."""
        if self.scores_from is None or self.scores_from + len(self.scores) >= len(self.given_ids):
            return None
        return self.scores_from + len(self.scores)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def token_ids(self) -> list[int]:
        """Those of `num_tokens`."""
        return self.request.prompt_ids + self.continuation[:-1] + self.output_ids

    def ids_between(self, start: int, end: int) -> list[int]:
        """`token_ids[start:end]`, without a copy of all the others."""
        prompt_len = len(self.request.prompt_ids)
        rest = self.continuation[:-1] + self.output_ids if self.continuation else self.output_ids
        return self.request.prompt_ids[start:end] + rest[max(start - prompt_len, 0) : max(end - prompt_len, 0)]

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends the sequence; text that was held back comes out, and may still complete a stop string.

        Never raises: a sequence can always be ended, and where a user's tokenizer fails it ends with "error".
        """
        try:
            self.text.finish()
        except Exception:
            logger.exception("request %r: the tokenizer failed at the end of the text", self.request.request_id)
            reason, stop_reason = "error", None
        if self.text.stopped_by is not None:
            reason, stop_reason = "stop", self.text.stopped_by
        self.finish_reason, self.stop_reason = reason, stop_reason

    def push(self, token_id: int, *, stopped: bool, at_length: bool) -> None:
        """Takes a sampled token, and the device's word on whether it ends the sequence."""
        self.output_ids.append(token_id)
        try:
            shown = not stopped or self.params.include_stop_str_in_output
            stop_string = self.text.push([token_id]).stopped_by if shown else None
        except Exception:  # a user's tokenizer: only the request that has it suffers
            logger.exception("request %r: the tokenizer failed at token %d", self.request.request_id, token_id)
            self.finish("error")
            return
        if stop_string is not None:
            self.finish("stop", stop_string)
        elif stopped:
            self.finish("stop", token_id if token_id in self.params.stop_token_ids else None)
        elif at_length:
            self.finish("length")

    def score(self) -> Score:
        """Of its continuation, once all of it has been computed."""
        pairs = list(zip(self.continuation, self.scores, strict=True))
        logprobs = [entry[token] for token, entry in pairs]
        is_greedy = all(token == next(iter(entry)) for token, entry in pairs)
        return Score(sum(logprobs), is_greedy, logprobs, list(self.continuation))

    def output(self) -> CompletionOutput:
        wanted = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text.text,
            token_ids=list(self.output_ids),
            logprobs=list(self.logprobs) if wanted else None,
            cumulative_logprob=self.cumulative_logprob if wanted else None,
            sampled_logprobs=list(self.sampled_logprobs) if self.params.sampled_logprobs else None,
            kept_masses=list(self.kept_masses) if self.params.sampled_logprobs else None,
            weights_versions=list(self.weights_versions),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and how to continue it."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    num_cached_tokens: int | None = None  # None until it has started
    beams: BeamSearch | None = None  # of a beam search, whose beams the sequences are

    @property
    def finished(self) -> bool:
        return None not in [sequence.finish_reason for sequence in self.sequences]

    def restart_beams(self) -> None:
        """A beam search begins anew, from the prompt."""
        assert self.beams is not None
        self.beams.reset()
        for sequence in self.sequences:
            sequence.output_ids, sequence.keys = [], []

    def take_beams(self) -> None:
        """The sequences get the tokens of the live beams."""
        assert self.beams is not None
        for sequence, beam in zip(self.sequences, self.beams.beams, strict=True):
            sequence.output_ids = list(beam.token_ids)

    def show_beams(self) -> None:
        """What a search has found so far becomes its sequences' output: it is ended from outside."""
        assert self.beams is not None
        for sequence, beam in zip(self.sequences, self.beams.beams, strict=False):
            self._show(sequence, beam, is_end=False)

    def take_completions(self) -> None:
        """The sequences get what a beam search has found, and end."""
        assert self.beams is not None
        for sequence, (_, beam) in zip(self.sequences, self.beams.completions, strict=True):
            self._show(sequence, beam, is_end=True)

    def _show(self, sequence: Sequence, beam: Beam, *, is_end: bool) -> None:
        assert self.beams is not None
        sequence.output_ids = []
        for place, token in enumerate(beam.token_ids, 1):
            ends = is_end and place == len(beam.token_ids)
            sequence.push(token, stopped=ends and token in self.beams.end_ids, at_length=ends)
        pairs = zip(beam.token_ids, beam.token_logprobs, strict=True)
        sequence.logprobs = [{token: logprob} for token, logprob in pairs]
        sequence.cumulative_logprob = beam.logprob

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The prompt's logprobs as far as known, which the first sequence computes; None where nobody asked."""
        return None if self.params.prompt_logprobs is None else [None, *self.sequences[0].scores]

    @property
    def scores(self) -> list[Score] | None:
        """Of the continuations, once all are known; None where there are none to score."""
        if any(not sequence.continuation or sequence.next_score is not None for sequence in self.sequences):
            return None
        return [sequence.score() for sequence in self.sequences]

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_ids),
            prompt_logprobs=self.prompt_logprobs,
            outputs=[sequence.output() for sequence in self.sequences],
            num_cached_tokens=self.num_cached_tokens or 0,
            metrics=self.metrics,
            scores=self.scores,
        )
