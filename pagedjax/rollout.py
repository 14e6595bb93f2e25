"""Generated samples as the arrays that a train step takes.

Dimensions: S samples, those of a prompt one after another; L tokens of a line, prompt and output.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from pagedjax.outputs import CompletionOutput, RequestOutput

_REMEDY = "make it with LLM.rollout, or with SamplingParams(logprobs=0, sampled_logprobs=True)"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RolloutArrays:
    """One line a sample: its prompt, its output, and padding. Where `mask` is False the values of tokens are 0 (the
    kept mass 1)."""

    tokens: np.ndarray  # i32[S, L], `pad_id` past the output
    positions: np.ndarray  # i32[S, L], 0 .. L - 1
    mask: np.ndarray  # bool[S, L], True for the generated tokens
    logprobs: np.ndarray  # f32[S, L], of each generated token from the raw logits that drew it
    sampled_logprobs: np.ndarray  # f32[S, L], the same under the processed distribution it was drawn from
    kept_masses: np.ndarray  # f32[S, L], of that distribution, what the cuts left before renormalising
    weights_versions: np.ndarray  # i32[S, L], of the weights that drew each token
    prompt_lens: np.ndarray  # i32[S]
    lengths: np.ndarray  # i32[S], of prompt and output
    prompt_index: np.ndarray  # i32[S], which prompt it answers
    complete: np.ndarray  # bool[S], False where the sample was aborted or failed


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What `LLM.rollout` gives.

    Attributes:
        outputs: one RequestOutput a prompt, in their order.
    """

    outputs: list[RequestOutput]

    def arrays(self, pad_to: int | None = None, pad_id: int = 0) -> RolloutArrays:
        """Lines for a train step.

        Args:
            pad_to: L, so that every batch has one shape; None is the longest line.
            pad_id: token id that fills a line up.

        Raises:
            ValueError: a line is longer than `pad_to`, or an output has no log-probabilities.
        """
        lines = [
            (index, output.prompt_token_ids, sample)
            for index, output in enumerate(self.outputs)
            for sample in output.outputs
        ]
        lengths = np.array([len(prompt) + len(sample.token_ids) for _, prompt, sample in lines], np.int32)
        longest = int(lengths.max(initial=0))
        length = longest if pad_to is None else pad_to
        if longest > length:
            raise ValueError(f"a line has {longest} tokens, and pad_to={length}; raise it, or generate fewer tokens")
        shape = (len(lines), length)
        tokens, versions = np.full(shape, pad_id, np.int32), np.zeros(shape, np.int32)
        mask, floats = np.zeros(shape, bool), np.zeros((3, *shape), np.float32)
        floats[2] = 1
        for line, (_, prompt, sample) in enumerate(lines):
            drawn = slice(len(prompt), int(lengths[line]))
            tokens[line, : len(prompt)], tokens[line, drawn] = prompt, sample.token_ids
            floats[:, line, drawn] = _floats(sample)  # first: it refuses what was not drawn, which has no versions
            mask[line, drawn], versions[line, drawn] = True, sample.weights_versions
        return RolloutArrays(
            tokens=tokens,
            positions=np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy(),
            mask=mask,
            logprobs=floats[0],
            sampled_logprobs=floats[1],
            kept_masses=floats[2],
            weights_versions=versions,
            prompt_lens=np.array([len(prompt) for _, prompt, _ in lines], np.int32),
            lengths=lengths,
            prompt_index=np.array([index for index, _, _ in lines], np.int32),
            complete=np.array([sample.finish_reason in ("stop", "length") for *_, sample in lines], bool),
        )


def own_logprobs(sample: CompletionOutput) -> list[float]:
    """Of each generated token, from the raw logits.

    Raises:
        ValueError: the request has not asked for them.
    """
    if sample.logprobs is None:
        raise ValueError(f"an output has no log-probabilities; {_REMEDY}")
    return [entry[token] for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]


def _floats(sample: CompletionOutput) -> list[list[float]]:
    own = own_logprobs(sample)
    if sample.sampled_logprobs is None or sample.kept_masses is None:
        raise ValueError(
            "an output has no log-probabilities of the distribution it was drawn from (those of a beam search are not "
            f"drawn); {_REMEDY}"
        )
    return [own, sample.sampled_logprobs, sample.kept_masses]
