"""The harness's view of an `LLM`: text in; log-likelihoods and text out, in the order of the requests."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import lm_eval.models  # noqa: F401  (the registry fills itself only as long as it is empty)
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from pagedjax import evaluation
from pagedjax.evaluation import Pair
from pagedjax.llm import LLM
from pagedjax.outputs import Score
from pagedjax.sampling_params import SamplingParams
from pagedjax.text import TextTokenizer, Tokenizer

logger = logging.getLogger(__name__)

Request = tuple[Any, list[int], list[int]]  # what the harness knows a request by (None: nothing), context, continuation

# The harness's platform names -> JAX's.
_PLATFORMS = {"cuda": "gpu"}
# Generations between two times that they are handed to the harness's cache, in batches of the engine: many, since
# the last of them leave rows empty.
_BATCHES_TOGETHER = 16


@register_model("pagedjax")
class PagedJaxLM(TemplateLM):
    """An `LLM` for the harness.

    Args:
        pretrained: what `LLM.load` takes, or an `LLM`, for which none of the options that make one can be given.
        tokenizer: a Hugging Face folder or GGUF file to take the tokenizer from, or one that `LLM.load` takes.
        dtype: of the parameters; None or "auto" keeps the stored one.
        max_length: the most tokens the model is given; the predicted one comes on top, so it is at most one less than
            the model's limit. None: one less than the engine's `max_model_len`.
        max_gen_toks: tokens to generate where a task does not say.
        add_bos_token: whether texts begin with BOS; None leaves it to the tokenizer.
        prefix_token_id: what an empty context is; None is BOS, or EOS where there is none.
        enable_thinking, chat_template_args: what the chat template reads.
        batch_size, max_batch_size: not used, the engine batches by itself: `max_num_seqs`.
        device: the harness's `--device`; JAX chooses its own, so it is only compared.
        **options: see `pagedjax.engine_config.EngineConfig`.

    Raises:
        ValueError: the model can't be loaded, or an option is wrong.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | LLM,
        *,
        tokenizer: Any = None,
        dtype: Any = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_device(device)
        if isinstance(pretrained, LLM):
            asked = {"tokenizer": tokenizer, "dtype": dtype, **options}
            if given := [name for name, value in asked.items() if value is not None]:
                raise ValueError(f"{', '.join(given)}: the LLM that was given is made already; make it with these")
            self.llm, self._tokenizer_name = pretrained, type(pretrained.tokenizer).__name__
        else:
            self.llm = _load(pretrained, tokenizer, dtype, max_length, options)
            self._tokenizer_name = str(pretrained if tokenizer is None else tokenizer).replace("/", "__")
        if self.llm.tokenizer is None:
            raise ValueError("an evaluation is of text, and this model has no tokenizer; give tokenizer=")
        self.tokenizer: TextTokenizer = self.llm.tokenizer
        longest = self.llm.config.max_model_len - 1
        self.max_length = longest if max_length is None else min(max_length, longest)
        if max_length is not None and max_length > longest:
            logger.warning("max_length=%d is capped at %d: what is predicted needs a place too", max_length, longest)
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        if add_bos_token and self.tokenizer.bos_id is None:
            raise ValueError("add_bos_token=True, and the tokenizer has no BOS token; leave it out")
        self._prefix_token_id = prefix_token_id
        self._chat_variables = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._chat_variables["enable_thinking"] = enable_thinking

    @property
    def tokenizer_name(self) -> str:
        """What the harness tells cached prompts of one chat template from those of another by."""
        return self._tokenizer_name

    # Tokens

    @property
    def eot_token_id(self) -> int | None:
        return next(iter(self.tokenizer.eos_ids), None)

    @property
    def prefix_token_id(self) -> int:
        for token in (self._prefix_token_id, self.tokenizer.bos_id, self.eot_token_id):
            if token is not None:
                return token
        raise ValueError("the tokenizer has neither BOS nor EOS for an empty context; give prefix_token_id=")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text, which gets no BOS if it begins with one."""
        if add_special_tokens is None:
            bos = self._prefix_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
            prefix = "" if bos is None else self.tokenizer.decode([bos], skip_special_tokens=False)
            begun = bool(prefix) and string.startswith(prefix)
            if self.add_bos_token and not begun and self.tokenizer.bos_id is not None:
                return [self.tokenizer.bos_id, *self.tokenizer.encode(string, add_special_tokens=False)]
            add_special_tokens = self.add_bos_token is None and not begun
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    # The harness's requests

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        wanted = [Pair(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        pairs = [pair.cut(self.max_length) for pair in wanted]
        _report_cut(sum(len(pair.context) < len(whole.context) for pair, whole in zip(pairs, wanted, strict=True)))
        with tqdm(total=len(pairs), desc="scoring", unit="request", disable=disable_tqdm) as bar:

            def done(index: int, score: Score) -> None:
                bar.update()
                if (request := requests[index][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", request, (score.logprob, score.is_greedy))

            scores = evaluation.score_pairs(
                self.llm.score_many, pairs, most=self.llm.config.max_num_seqs, on_score=done
            )
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows that the harness makes of them."""
        texts = [text for (text,) in (request.args for request in requests)]
        windows: list[Request] = []
        owners: list[int] = []  # whose text each window is of
        for index, text in enumerate(texts):
            rolling = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            for window in rolling:
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(texts)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations of texts, each up to its stop strings."""
        arguments = [request.args for request in requests]
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        num_cut = 0
        for text, gen_kwargs in arguments:
            entry = evaluation.generation_params(gen_kwargs, self.tokenizer, default_length=self.max_gen_toks)
            whole = self.tok_encode(text) or [self.prefix_token_id]
            prompts.append(evaluation.cut_prompt(whole, self.max_length, entry.max_tokens))
            params.append(entry)
            num_cut += len(prompts[-1]) < len(whole)
        _report_cut(num_cut)
        texts: dict[int, str] = {}
        order = sorted(range(len(prompts)), key=prompts.__getitem__)  # what begins alike runs together
        size = _BATCHES_TOGETHER * self.llm.config.max_num_seqs
        for start in range(0, len(order), size):
            some = order[start : start + size]
            asked = [params[index] for index in some]
            outputs = self.llm.generate([prompts[index] for index in some], asked, use_tqdm=not disable_tqdm)
            for index, output in zip(some, outputs, strict=True):
                texts[index] = output.outputs[0].text
                self.cache_hook.add_partial("generate_until", arguments[index], texts[index])
        return [texts[index] for index in range(len(prompts))]

    # Chats

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation."""
        tokenizer = self._chat_tokenizer()

        def render(messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
            return tokenizer.render_chat(messages, **self._chat_variables, **variables)

        return evaluation.chat_text(render, chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template in use, for the harness's records."""
        if not chat_template:
            return None
        tokenizer = self._chat_tokenizer()
        if isinstance(chat_template, str):
            if chat_template not in tokenizer.chat_templates:
                known = sorted(tokenizer.chat_templates)
                raise ValueError(f"there is no chat template {chat_template!r}; the tokenizer has {known}")
            self._chat_variables["template"] = chat_template
            return tokenizer.chat_templates[chat_template]
        return tokenizer.chat_template

    def _chat_tokenizer(self) -> Tokenizer:
        if not isinstance(self.tokenizer, Tokenizer):
            raise ValueError(
                "chat templates need a tokenizer that pagedjax has read itself: pagedjax.text.Tokenizer.from_folder"
            )
        return self.tokenizer


def _load(
    source: str | os.PathLike[str], tokenizer: Any, dtype: Any, max_length: int | None, options: dict[str, Any]
) -> LLM:
    if "max_model_len" in options:
        raise ValueError(f"max_model_len={options['max_model_len']} follows from max_length here; give max_length")
    if max_length is not None:
        options = {**options, "max_model_len": max_length + 1}  # the last token of a continuation is only predicted
    if isinstance(tokenizer, str | os.PathLike):
        path = pathlib.Path(tokenizer)
        tokenizer = Tokenizer.from_gguf(path) if path.is_file() else Tokenizer.from_folder(path)
    return LLM.load(source, None if dtype == "auto" else dtype, tokenizer=tokenizer, **options)


def _check_device(device: str | None) -> None:
    if device is None:
        return
    name = str(device).partition(":")[0]
    found = jax.default_backend()
    if _PLATFORMS.get(name, name) != found:
        raise ValueError(f"device={device!r}, and JAX runs on {found!r}; choose with JAX_PLATFORMS instead")


def _report_cut(num_cut: int) -> None:
    if num_cut:
        logger.warning("%d contexts are longer than max_length allows and have lost their beginning", num_cut)
