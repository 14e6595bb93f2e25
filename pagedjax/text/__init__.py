"""Text in and out: tokenizers, chat templates, incremental detokenization and stop strings. No jax in here."""

from pagedjax.text.adapter import as_tokenizer
from pagedjax.text.detokenizer import IncrementalDetokenizer
from pagedjax.text.output_text import OutputText, TextDelta
from pagedjax.text.protocol import TextTokenizer, TokenizerLike
from pagedjax.text.stop_strings import StopStrings, check_stop_strings
from pagedjax.text.tokenizer import Tokenizer

__all__ = [
    "IncrementalDetokenizer",
    "OutputText",
    "StopStrings",
    "TextDelta",
    "TextTokenizer",
    "Tokenizer",
    "TokenizerLike",
    "as_tokenizer",
    "check_stop_strings",
]
