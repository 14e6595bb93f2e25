"""Makes requests of what callers ask for, or says what has to change: nothing wrong gets further than here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import numpy as np

from pagedjax.beam_search import BeamSearch, BeamSearchParams
from pagedjax.outputs import RequestMetrics
from pagedjax.request import Request, Sequence
from pagedjax.sampling_params import MAX_STOP_IDS, SamplingParams
from pagedjax.scheduler import Scheduler
from pagedjax.text import TextTokenizer
from pagedjax.text.output_text import OutputText


class RequestMaker:
    """Knows what a request may be.

    Every method raises ValueError, with what to change, for one that cannot be served.

    Args:
        scheduler: knows what fits.
        tokenizer: of the outputs' text, or None: then they have none.
        vocab_size: token ids are below it.
        end_ids: the model's end tokens.
        seed: what seeds are derived from for requests that give none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        tokenizer: TextTokenizer | None,
        vocab_size: int,
        end_ids: Iterable[int],
        seed: int = 0,
    ) -> None:
        self.tokenizer, self.vocab_size, self.end_ids = tokenizer, vocab_size, frozenset(end_ids)
        self._scheduler, self._seed = scheduler, seed
        self.num_made = 0  # requests so far: the next one's seed is a function of it where it gives none

    def sampled(self, request_id: str, prompt: str | None, prompt_ids: list[int], params: SamplingParams) -> Request:
        """A prompt that is to be continued."""
        self.check_ids(prompt_ids, "the prompt")
        params.check_vocab(self.vocab_size)
        end_len = self._end_len(prompt_ids, params.max_tokens)
        request = self._request(request_id, prompt, prompt_ids, params)
        request.sequences = [self._sequence(request, index, end_len) for index in range(params.n)]
        if params.prompt_logprobs is not None:
            request.sequences[0].scores_from = 1
        return self._made(request)

    def scored(
        self, request_id: str, prompt_ids: list[int], continuations: list[list[int]], cache_salt: str | None
    ) -> Request:
        """Continuations of one prompt whose logprobs are wanted: when it ends, the `scores` of its sequences."""
        self.check_ids(prompt_ids, "the prompt")
        params = SamplingParams(
            temperature=0.0, max_tokens=1, n=len(continuations), prompt_logprobs=1, cache_salt=cache_salt
        )
        request = self._request(request_id, None, prompt_ids, params)
        for index, continuation in enumerate(continuations):
            self.check_ids(continuation, f"continuation {index}")
            end_len = len(prompt_ids) + len(continuation)
            if end_len > self._scheduler.max_model_len:
                raise ValueError(
                    f"{len(prompt_ids)} prompt tokens + {len(continuation)} of continuation {index} are more than "
                    f"max_model_len={self._scheduler.max_model_len}; shorten them or raise it"
                )
            self._scheduler.check_fits(len(prompt_ids), end_len)
            sequence = self._sequence(request, index, end_len)
            sequence.continuation, sequence.scores_from = continuation, len(prompt_ids)
            request.sequences.append(sequence)
        return self._made(request)

    def searched(self, request_id: str, prompt: str | None, prompt_ids: list[int], params: BeamSearchParams) -> Request:
        """A prompt whose most likely continuations are wanted."""
        self.check_ids(prompt_ids, "the prompt")
        end_len = self._end_len(prompt_ids, params.max_tokens)
        params = dataclasses.replace(params, max_tokens=end_len - len(prompt_ids))
        beams = BeamSearch(params, self.end_ids)
        if beams.num_candidates > self.vocab_size:
            raise ValueError(f"width {params.width} is too large for a vocabulary of {self.vocab_size} tokens")
        sampling_params = SamplingParams(
            n=params.width, temperature=0.0, max_tokens=params.max_tokens, logprobs=beams.num_candidates
        )
        request = self._request(request_id, prompt, prompt_ids, sampling_params)
        request.beams = beams
        request.sequences = [self._sequence(request, index, end_len) for index in range(params.width)]
        for sequence in request.sequences:
            sequence.stop_ids = frozenset()  # the search decides what ends
        return self._made(request)

    def _end_len(self, prompt_ids: list[int], max_tokens: int) -> int:
        end_len = min(len(prompt_ids) + max_tokens, self._scheduler.max_model_len)
        self._scheduler.check_fits(len(prompt_ids), end_len)
        return end_len

    def check_ids(self, token_ids: list[int], what: str) -> None:
        """Refuses no tokens, and tokens that the model does not have."""
        if not token_ids:
            raise ValueError(f"{what} has no tokens; give at least one (an empty text needs a tokenizer with BOS)")
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"token id {token} of {what} is outside the vocabulary; ids go from 0 to {self.vocab_size - 1}"
                )

    def _request(self, request_id: str, prompt: str | None, prompt_ids: list[int], params: SamplingParams) -> Request:
        return Request(request_id, prompt, prompt_ids, params, RequestMetrics(time.monotonic()))

    def _made(self, request: Request) -> Request:
        self.num_made += 1
        return request

    def _sequence(self, request: Request, index: int, end_len: int) -> Sequence:
        params = request.params
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"{len(params.stop_token_ids)} stop_token_ids and the model's end tokens are {len(stop_ids)} ids, "
                f"and a row holds {MAX_STOP_IDS}; give fewer"
            )
        seed = params.seed
        if seed is None:
            words = np.random.SeedSequence([self._seed, self.num_made]).generate_state(2, np.uint32)
            seed = int(words[0]) << 31 | int(words[1]) >> 1
        return Sequence(
            request=request,
            index=index,
            seed=seed,
            stop_ids=stop_ids,
            end_len=end_len,
            text=OutputText(
                self.tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            ),
        )
