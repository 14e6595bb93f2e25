"""The public face: load a model, generate, chat, stream.

Everything a request goes through is in `pagedjax.engine`; here are prompts, files, progress and the reserved memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from pagedjax import capacity, compile_cache, snapshot, workspace
from pagedjax.beam_search import BeamSearchParams
from pagedjax.config import ModelConfig
from pagedjax.decoder import Decoder
from pagedjax.engine import Engine
from pagedjax.engine_config import EngineConfig
from pagedjax.events import Event
from pagedjax.loaders import load_checkpoint, load_tokenizer
from pagedjax.memory import kv_block_bytes, kv_pool_dtype, pool_size
from pagedjax.new_request import RequestMaker
from pagedjax.observer import Observer
from pagedjax.outbox import Outbox
from pagedjax.outputs import RequestOutput, Score
from pagedjax.params import check_on_one_device, device_bytes, param_dtype, place_params, replace_params
from pagedjax.prompts import Prompt, at_index, match_params, parse_continuations, parse_prompt, parse_prompts
from pagedjax.request import Request
from pagedjax.rollout import Rollout
from pagedjax.runner import Runner
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduler import Scheduler
from pagedjax.stats import Stats
from pagedjax.tensor_parallel import tensor_parallel
from pagedjax.text import as_tokenizer

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, its KV pool and the engine around them.

    Args:
        model: a `Decoder`, with parameters or from `Decoder.abstract`. Any nnx.Module with the same `config`, `paged`
            and `logits` will do.
        params: the parameters: an `nnx.State` as `nnx.state(model)` gives, a nested dict of arrays with the same names,
            or a module that has them. Device arrays are used as they are, never copied. None: those of `model`, which
            also has what is left out of the variables that are no `nnx.Param`.
        tokenizer: `pagedjax.text.Tokenizer`, a transformers tokenizer, or anything with `encode` and `decode`; None
            works with token ids only.
        end_ids: tokens that end a generation, beside the tokenizer's.
        on_event: called with each `pagedjax.events.Event`, from within the call that makes it happen; what it raises is
            logged and ignored.
        **options: see `pagedjax.engine_config.EngineConfig`.

    Raises:
        ValueError: an option, the parameters or the sizes do not fit; the message says what to change.
    """

    def __init__(
        self,
        model: Any,
        params: Any = None,
        tokenizer: Any = None,
        *,
        end_ids: Sequence[int] = (),
        on_event: Callable[[Event], None] | None = None,
        **options: Any,
    ) -> None:
        config = _engine_config(options, model.config)
        self.config, self.model_config = config, model.config
        self.tokenizer = as_tokenizer(tokenizer)
        graphdef, abstract = nnx.split(model)
        self._parallel = parallel = tensor_parallel(config.mesh, model.config)
        sharding_of = None if parallel is None else parallel.param_sharding
        params = place_params(abstract if params is None else params, abstract, sharding_of)
        if parallel is None:
            check_on_one_device(params)
        kv_dtype = kv_pool_dtype(config.kv_cache_dtype, param_dtype(params))
        on_device = model.config if parallel is None else parallel.on_device(model.config)
        self._kv_dtype, self._block_bytes = kv_dtype, kv_block_bytes(on_device, kv_dtype, config.block_size)
        self._params_bytes = device_bytes(params)
        self.num_vocab_tokens = vocab_size = _num_vocab_tokens(model.config, self.tokenizer)
        measure = functools.partial(
            workspace.measure,
            *(graphdef, params, config, model.config),
            kv_dtype=kv_dtype,
            num_vocab_tokens=vocab_size,
        )
        self._pool_size = pool_size(config, self._block_bytes, measure)
        num_blocks = self._pool_size.num_blocks if parallel is None else parallel.agree(self._pool_size.num_blocks)
        self._runner = Runner(
            graphdef,
            params,
            config,
            model.config,
            num_blocks=num_blocks,
            kv_dtype=kv_dtype,
            num_vocab_tokens=vocab_size,
            engine_params=getattr(model, "engine_params", None) if parallel is None else None,
        )
        scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            decode_steps=config.decode_steps,
            num_speculative_tokens=config.num_speculative_tokens,
            watermark=config.watermark,
            enable_prefix_caching=config.enable_prefix_caching,
            window=model.config.largest_window,
        )
        eos_ids = self.tokenizer.eos_ids if self.tokenizer is not None else ()
        self._engine = Engine(
            self._runner,
            scheduler,
            defragment_above=config.defragment_above,
            async_scheduling=_async_scheduling(config, params),
            observer=Observer(on_event),
        )
        self._maker = RequestMaker(
            scheduler,
            tokenizer=self.tokenizer,
            vocab_size=vocab_size,
            end_ids={*end_ids, *eos_ids},
            seed=config.seed,
        )
        self._outbox = Outbox(self._engine)
        self._ids = itertools.count()

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str],
        dtype: Any = None,
        *,
        tokenizer: Any = None,
        on_event: Callable[[Event], None] | None = None,
        **options: Any,
    ) -> LLM:
        """Loads a model with its tokenizer.

        The engine's compiled programs are kept in the user's cache folder, for a start in seconds the next time, unless
        the process has a compilation cache of its own or none by choice (`pagedjax.compile_cache`).

        Args:
            source: "smollm2-135m-instruct" (fetched on first use), a Hugging Face folder with safetensors, a .gguf
                file, or a checkpoint saved by `pagedjax.loaders.orbax`.
            dtype: of the parameters; None keeps the stored one (float32 for a quantised GGUF file).
            tokenizer: instead of the one beside the weights. Without either, prompts are token ids.
            on_event: as in `LLM`.
            **options: see `pagedjax.engine_config.EngineConfig`.

        Raises:
            ValueError: the source is not a model that can be loaded, or an option is wrong.
            pagedjax.loaders.FetchError: the model could not be fetched.
        """
        EngineConfig(**_known(options))  # a wrong option fails before minutes of loading
        checkpoint = load_checkpoint(source, dtype)
        end_ids: Sequence[int] = ()
        try:
            own_tokenizer, end_ids = load_tokenizer(checkpoint.source_path)
        except ValueError:
            if tokenizer is None:
                raise  # with a tokenizer given, one beside the weights that can't be read does not matter
        else:
            tokenizer = own_tokenizer if tokenizer is None else tokenizer
        config = checkpoint.config
        if config.rope.kind == "dynamic":  # the frequencies of this kind depend on the longest sequence there can be
            longest = max(config.max_position_embeddings, options.get("max_model_len", 0))
            config = dataclasses.replace(config, max_position_embeddings=longest)
        model = Decoder.abstract(config, jax.tree.leaves(checkpoint.params)[0].dtype)
        params = checkpoint.params
        if options.get("mesh") is None:  # nobody else has these arrays: on a CPU they are used where they are
            params = jax.tree.map(functools.partial(jax.device_put, may_alias=True), params)
        with compile_cache.programs_kept():
            llm = cls(model, params, tokenizer, end_ids=end_ids, on_event=on_event, **options)
        llm._runner.compiling = compile_cache.programs_kept
        return llm

    # Many prompts at once

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, as many at once as rows and blocks allow.

        Args:
            prompts: text or a list of token ids, or a list of these. An empty list gives an empty list.
            sampling_params: one for all prompts, or one each; None is `SamplingParams()`.
            use_tqdm: shows a progress bar on stderr.

        Returns:
            One finished RequestOutput a prompt, in their order.

        Raises:
            ValueError: a prompt or its parameters cannot be served (its index is named); then nothing has been started.
        """
        return self._generate(parse_prompts(prompts, self.tokenizer), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the tokenizer's chat template.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], or a list of such conversations.
            sampling_params: one for all, or one each.
            use_tqdm: shows a progress bar on stderr.

        Returns:
            One RequestOutput a conversation.
        """
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = list(messages) if many else [messages]
        prompts = [Prompt(None, self.chat_prompt(conversation)) for conversation in conversations]  # type: ignore[arg-type]
        return self._generate(prompts, sampling_params, use_tqdm)

    def rollout(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> Rollout:
        """As `generate`, with what a train step needs to know of every token: `rollout(...).arrays(pad_to=...)`.

        Args:
            prompts: as in `generate`.
            sampling_params: as in `generate`; `logprobs` and `sampled_logprobs` are asked for here.
            use_tqdm: shows a progress bar on stderr.
        """
        parsed = parse_prompts(prompts, self.tokenizer)
        asked = [
            dataclasses.replace(params, logprobs=params.logprobs or 0, sampled_logprobs=True)
            for params in match_params(sampling_params, len(parsed))
        ]
        return Rollout(self._generate(parsed, asked, use_tqdm))

    def chat_prompt(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ending where the model's answer begins."""
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer with a chat template; give the engine one, or use token ids")
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Completes one prompt and yields its text as it comes.

        The deltas never split a character and never have to be taken back; joined they are the completion's `text`.
        Closing the iterator aborts the request.

        Args:
            prompt: text or token ids.
            sampling_params: with n=1.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"stream yields one text, and n={params.n}; use n=1, or add_request and step")
        if self.tokenizer is None:
            raise ValueError("stream yields text, which needs a tokenizer; use add_request and step for token ids")
        text, ids = parse_prompt(prompt, self.tokenizer)
        deltas = self._stream(self._maker.sampled(self._new_id("stream"), text, ids, params))
        next(deltas)  # a generator that has begun is also cleaned up if nobody ever asks it for text
        return deltas

    def beam_search(
        self, prompts: Any, params: BeamSearchParams | None = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """The most likely completions of prompts, by beam search; beams share the blocks of what they have in common.

        Args:
            prompts: as in `generate`.
            params: how to search, for all prompts; None is `BeamSearchParams()`.
            use_tqdm: shows a progress bar on stderr.

        Returns:
            One RequestOutput a prompt, with `width` outputs, the best first by cumulative_logprob / length **
            length_penalty (the end token counts). Their logprobs have each token's own alone.

        Raises:
            ValueError: a prompt cannot be served (its index is named); then nothing has been started.
        """
        params = params or BeamSearchParams()
        parsed = parse_prompts(prompts, self.tokenizer)
        ids = [self._new_id("beams") for _ in parsed]

        def add(index: int) -> None:
            prompt = parsed[index]
            request = at_index(index, self._maker.searched, ids[index], prompt.text, prompt.token_ids, params)
            at_index(index, self._engine.add, request)

        return self._run(ids, add, use_tqdm)

    # How likely given texts are

    def score(self, prompt: Any, continuations: Sequence[Any], *, cache_salt: str | None = None) -> list[Score]:
        """Log-probabilities of continuations of one prompt, which is computed once; each continuation forks it.

        Args:
            prompt: text or token ids.
            continuations: texts, or lists of token ids. A text's tokens are those that prompt and continuation have
                together beyond the prompt's own, so begin it with the space that belongs to it.
            cache_salt: as in `SamplingParams`.

        Returns:
            One Score a continuation, in their order.

        Raises:
            ValueError: something cannot be scored; the message says what to change.
            RuntimeError: a step failed twice while it was scored.
        """
        return dict(self._score([self._scored(prompt, continuations, cache_salt)]))[0]

    def score_many(
        self, prompts: Sequence[Any], continuations: Sequence[Sequence[Any]], *, cache_salt: str | None = None
    ) -> Iterator[tuple[int, list[Score]]]:
        """Log-probabilities of continuations of several prompts, as many at once as rows and blocks allow.

        Args:
            prompts: texts, or lists of token ids.
            continuations: those of each prompt, as in `score`.
            cache_salt: as in `SamplingParams`.

        Returns:
            An iterator of a prompt's index and its scores, as they become known. Closing it aborts the rest.

        Raises:
            ValueError: something cannot be scored (the prompt's index is named); then nothing has been started.
            RuntimeError: a step failed twice while something was scored.
        """
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(prompts)} prompts and {len(continuations)} lists of continuations; give one each")
        pairs = enumerate(zip(prompts, continuations, strict=True))
        return self._score([at_index(index, self._scored, *pair, cache_salt) for index, pair in pairs])

    def _scored(self, prompt: Any, continuations: Sequence[Any], cache_salt: str | None) -> Request | None:
        """A request for scores; None if there are no continuations."""
        text, ids = parse_prompt(prompt, self.tokenizer)
        parsed = parse_continuations(continuations, text, ids, self.tokenizer)
        return self._maker.scored(self._new_id("score"), ids, parsed, cache_salt) if parsed else None

    def _score(self, requests: Sequence[Request | None]) -> Iterator[tuple[int, list[Score]]]:
        """The scores of requests that have yet to be queued, and their index, as they become known."""
        places = {request.request_id: place for place, request in enumerate(requests) if request is not None}
        box, num_left = self._outbox.claim(places), len(places)
        try:
            for place, request in enumerate(requests):
                if request is None:
                    yield place, []
                else:
                    self._engine.add(request)
            while num_left:
                for output in self._outbox.take(box):
                    if not output.finished:
                        continue
                    if output.scores is None:
                        raise RuntimeError("scoring ended early; the engine has logged why")
                    num_left -= 1
                    yield places[output.request_id], output.scores
        finally:
            self._outbox.give_up(places)

    # One step at a time

    def add_request(self, request_id: str, prompt: Any, sampling_params: SamplingParams | None = None) -> None:
        """Queues a request; `step` runs it.

        Args:
            request_id: any string that no unfinished request has.
            prompt: text or token ids.
            sampling_params: None is `SamplingParams()`.

        Raises:
            ValueError: it cannot be served; the message says what to change. Other requests are not affected.
        """
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a string, not {type(request_id).__name__}: {request_id!r}")
        text, ids = parse_prompt(prompt, self.tokenizer)
        self._engine.add(self._maker.sampled(request_id, text, ids, match_params(sampling_params, 1)[0]))

    def step(self) -> list[RequestOutput]:
        """Runs one step.

        Returns:
            The requests that got tokens or ended, as they stand; finished ones come once more and then never again.
        """
        return self._outbox.take_unclaimed()

    def abort(self, request_id: str) -> None:
        """Ends a request now; its output so far comes out of the next `step` with finish_reason "abort".

        Raises:
            KeyError: no unfinished request has this id.
        """
        self._engine.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do or to hand out."""
        return self._outbox.has_unclaimed or self._engine.has_unfinished()

    # In another process

    def save_state(self, folder: str | os.PathLike[str], *, include_kv: bool = False) -> None:
        """Saves the unfinished requests with all they have so far, and the outputs not yet handed out; goes on as if
        nothing had happened. See docs/checkpointing.md.

        Args:
            folder: for saved states alone. A state that is there is replaced once the new one is complete, so that the
                process may be killed at any time.
            include_kv: whether K/V of the running requests is saved too; else `load_state` computes it again.

        Raises:
            OSError, ValueError: the folder cannot be written to; the engine is not affected.
        """
        from pagedjax.snapshot import folder as snapshot_folder  # here: Orbax takes more than a second

        state = snapshot.take(self._engine, self._maker, self._outbox, include_kv=include_kv)
        snapshot_folder.save(folder, state)

    def load_state(self, folder: str | os.PathLike[str], *, include_kv: bool = True) -> list[str]:
        """Goes on with what another engine has saved: `step` then gives what its `step` would have given.

        The weights are yours to restore. The sizes of the engine may be others, as long as every request fits.

        Args:
            folder: that `save_state` has written to.
            include_kv: whether to use K/V where it was saved, for which the pool has to have the same layout.

        Returns:
            The ids of the unfinished requests.

        Raises:
            FileNotFoundError: there is no such folder, or no finished state in it: there is nothing to go on with.
            ValueError: the state can't be read; this engine has something to do; or it can't go on with a request,
                which is named, or with the K/V. Then nothing has changed.
        """
        from pagedjax.snapshot import folder as snapshot_folder

        state = snapshot_folder.load(folder)
        return snapshot.restore(state, self._engine, self._maker, self._outbox, include_kv=include_kv)

    # Weights, memory, figures

    def update_params(self, params: Any, running: Literal["refuse", "recompute", "keep"] = "refuse") -> None:
        """Uses other weights from the next step on, without a copy.

        Args:
            params: with the names, shapes, dtypes and shardings of the present ones, as for `LLM`; present variables
                that are no `nnx.Param` stay where they are left out.
            running: what to do with unfinished requests: "refuse" raises, "recompute" computes their K/V anew with the
                new weights, "keep" goes on with K/V of the old ones.

        Raises:
            ValueError: the parameters do not match, or requests are unfinished and `running` is "refuse".
        """
        if running not in ("refuse", "recompute", "keep"):
            raise ValueError(f"running={running!r} is not one of 'refuse', 'recompute', 'keep'")
        num_unfinished = len(self._engine.requests)
        if running == "refuse" and num_unfinished:
            raise ValueError(
                f"{num_unfinished} requests are unfinished; finish or abort them, or pass running='recompute' or 'keep'"
            )
        self._engine.change_params(replace_params(params, self._runner.params), recompute=running == "recompute")

    @property
    def graphdef(self) -> Any:
        """The model without its parameters: `nnx.merge(llm.graphdef, llm.params)` is the module."""
        return self._runner.graphdef

    @property
    def params(self) -> Any:
        """The parameters in use, an nnx.State."""
        return self._runner.params

    @property
    def weights_version(self) -> int:
        """How often `update_params` has been called, by an engine whose state was loaded too."""
        return self._engine.scheduler.ledger.weights_version

    def warmup(self) -> None:
        """Compiles every program of `plan`, with a progress bar; afterwards no step compiles."""
        with tqdm(total=len(self._runner.program_names), desc="compiling", unit="program", leave=False) as bar:

            def show(name: str) -> None:
                bar.set_postfix_str(name, refresh=False)
                bar.update()

            self._runner.warmup(show)

    @property
    def plan(self) -> capacity.EnginePlan:
        """What is reserved and what may be compiled; print it."""
        return capacity.EnginePlan(
            num_blocks=self._engine.scheduler.num_usable_blocks + 1,
            block_size=self.config.block_size,
            block_bytes=self._block_bytes,
            kv_cache_dtype=self._kv_dtype.name,
            params_bytes=self._params_bytes,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            programs=self._runner.program_names,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            window=self.model_config.largest_window,
            sized_by=self._pool_size.reason,
            num_devices=1 if self._parallel is None else self._parallel.num_parts,
        )

    def stats(self) -> Stats:
        """Figures of this moment."""
        return Stats.of(self._engine)

    def defragment(self) -> int:
        """Moves the used blocks to the front of the pool, which is how a dump of it becomes small; what runs goes on
        as if nothing had happened, and no faster.

        Returns:
            How many blocks were moved.
        """
        return self._engine.defragment()

    def export_kv(self, request_id: str, index: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """K and V of an unfinished request, made contiguous, for tools that look into them.

        Args:
            request_id: as given to `add_request`.
            index: which of its samples.

        Returns:
            k, v: [num_layers, tokens computed so far, num_kv_heads, head_dim], in the pool's dtype or dequantised to
            float32; zero where a sliding window has passed.

        Raises:
            KeyError: no unfinished request has this id.
            ValueError: there is no such sample, or it waits and has no K/V.
        """
        return self._engine.kv_of(request_id, index)

    def audit(self) -> None:
        """Checks that the idle engine holds nothing but cached blocks.

        Raises:
            RuntimeError: it is not idle, or something leaked.
        """
        self._engine.audit()

    # Private

    def _generate(self, prompts: list[Prompt], sampling_params: Any, use_tqdm: bool) -> list[RequestOutput]:
        params = match_params(sampling_params, len(prompts))
        ids = [self._new_id("generate") for _ in prompts]

        def add(index: int) -> None:
            prompt = prompts[index]
            request = at_index(index, self._maker.sampled, ids[index], prompt.text, prompt.token_ids, params[index])
            at_index(index, self._engine.add, request)

        return self._run(ids, add, use_tqdm)

    def _run(self, ids: list[str], add: Callable[[int], None], use_tqdm: bool) -> list[RequestOutput]:
        """Adds requests, all or none, and runs them to their end."""
        done: dict[str, RequestOutput] = {}
        box = self._outbox.claim(ids)
        try:
            for index in range(len(ids)):
                add(index)
            with tqdm(total=len(ids), desc="generating", unit="request", disable=not use_tqdm) as bar:
                self._runner.on_compile = lambda name: bar.set_description(f"compiling {name}")
                while len(done) < len(ids):
                    for output in self._outbox.take(box):
                        if output.finished:
                            done[output.request_id] = output
                            bar.update()
                    if use_tqdm:
                        bar.set_description("generating", refresh=False)
                        bar.set_postfix(self._progress(), refresh=False)
        finally:
            self._runner.on_compile = _quiet
            self._outbox.give_up(ids)
        return [done[request_id] for request_id in ids]

    def _stream(self, request: Request) -> Iterator[str]:
        shown = 0
        finished = False
        box = self._outbox.claim([request.request_id])
        try:
            self._engine.add(request)
            yield ""
            while not finished:
                for output in self._outbox.take(box):
                    text, finished = output.outputs[0].text, output.finished
                    if len(text) > shown:
                        yield text[shown:]
                        shown = len(text)
        finally:
            self._outbox.give_up([request.request_id])

    def _progress(self) -> dict[str, str]:
        stats = self.stats()
        return {
            "running": str(stats.num_running),
            "waiting": str(stats.num_waiting),
            "kv": f"{stats.kv_usage:.0%}",
            "hits": f"{stats.prefix_hit_rate:.0%}",
            "preempted": str(stats.num_preemptions),
            "tokens": str(stats.num_generated_tokens),
        }

    def _new_id(self, prefix: str) -> str:
        return next(name for i in self._ids if not self._engine.knows(name := f"{prefix}-{i}"))


def _quiet(name: str) -> None:
    """Nobody watches: a program's name goes nowhere."""


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"unknown engine options {unknown}; the known ones are {sorted(known)}")
    return options


def _async_scheduling(config: EngineConfig, params: Any) -> bool:
    if config.async_scheduling is not None:
        return config.async_scheduling
    (platform,) = {device.platform for leaf in jax.tree.leaves(params) for device in leaf.devices()} or {"cpu"}
    return platform != "cpu"


def _engine_config(options: Mapping[str, Any], model: ModelConfig) -> EngineConfig:
    config = EngineConfig(**_known(options))
    if config.max_model_len > model.max_position_embeddings:
        logger.warning("max_model_len is capped at the model's %d positions", model.max_position_embeddings)
        config = dataclasses.replace(config, max_model_len=model.max_position_embeddings)
    return config


def _num_vocab_tokens(model: ModelConfig, tokenizer: Any) -> int:
    """How many ids can be drawn: padding rows of the embedding are no tokens."""
    if model.num_tokens is not None:
        return model.num_tokens
    if tokenizer is None or not tokenizer.vocab_size:
        return model.vocab_size
    return min(model.vocab_size, tokenizer.vocab_size)
