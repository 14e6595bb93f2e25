"""Command-line options that the example scripts share: the model, the engine and every sampling option."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from pagedjax import LLM, SamplingParams

DEFAULT_MODEL = "smollm2-135m-instruct"


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the model, engine and sampling options."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    result.add_argument(
        "--model", default=DEFAULT_MODEL, help="a known name, a Hugging Face folder, a .gguf file or an Orbax folder"
    )
    result.add_argument("--dtype", default=None, help="of the parameters, such as bfloat16; default: as stored")
    engine = result.add_argument_group("engine")
    engine.add_argument("--max-model-len", type=int, default=2048, help="most tokens a sequence may have")
    engine.add_argument("--block-size", type=int, default=16, help="tokens a KV block")
    engine.add_argument("--num-blocks", type=int, default=None, help="KV blocks; default: from memory")
    engine.add_argument("--max-num-seqs", type=int, default=64, help="sequences that run at once")
    engine.add_argument("--max-num-batched-tokens", type=int, default=512, help="tokens a step")
    sampling = result.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256, help="tokens to generate, at most")
    sampling.add_argument("--min-tokens", type=int, default=0, help="tokens to generate, at least")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    sampling.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling; 1 is off")
    sampling.add_argument("--top-k", type=int, default=0, help="0 is off")
    sampling.add_argument("--min-p", type=float, default=0.0, help="0 is off")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is off")
    sampling.add_argument("--presence-penalty", type=float, default=0.0)
    sampling.add_argument("--frequency-penalty", type=float, default=0.0)
    sampling.add_argument("--seed", type=int, default=None, help="makes sampled text reproducible")
    sampling.add_argument("--stop", action="append", default=[], help="a string that ends the text; may be repeated")
    sampling.add_argument("--stop-token-ids", type=int, nargs="*", default=[], help="token ids that end the text")
    sampling.add_argument("--include-stop-str-in-output", action="store_true")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after end tokens")
    sampling.add_argument("--keep-special-tokens", action="store_true", help="show special tokens in the text")
    sampling.add_argument(
        "--logit-bias", type=_bias, nargs="*", default=[], metavar="ID:BIAS", help="added to a token's logit"
    )
    return result


def load(options: argparse.Namespace) -> LLM:
    """The engine that the options ask for."""
    return LLM.load(
        options.model,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )


def sampling_params(options: argparse.Namespace, **more: Any) -> SamplingParams:
    """The sampling parameters that the options ask for."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    values = {name: value for name, value in vars(options).items() if name in names}
    values["skip_special_tokens"] = not options.keep_special_tokens
    values["logit_bias"] = dict(options.logit_bias) or None
    return SamplingParams(**{**values, **more})


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:BIAS, such as 42:-5.0") from None
