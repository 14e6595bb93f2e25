"""The tokenizer that lies beside the weights, and the end tokens that the checkpoint names."""

from __future__ import annotations

import logging
import pathlib

from pagedjax.loaders.gguf_file import GGUFFile
from pagedjax.text import Tokenizer, hf_folder

logger = logging.getLogger(__name__)


def load_tokenizer(source_path: pathlib.Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """Reads what a checkpoint says about text.

    Args:
        source_path: a folder or a GGUF file, as `Checkpoint.source_path` names it.

    Returns:
        The tokenizer, None (with a warning) for a folder without tokenizer.json; and the end tokens of config.json,
        generation_config.json or the GGUF file, which hold with any other tokenizer too.

    Raises:
        ValueError: there is a tokenizer, and it cannot be read or reproduced; the message names it.
    """
    if source_path.is_file():
        tokenizer = Tokenizer.from_gguf(GGUFFile(source_path).reader)
        return tokenizer, tokenizer.eos_ids
    end_ids = hf_folder.end_ids(source_path)
    if (source_path / "tokenizer.json").exists():
        return Tokenizer.from_folder(source_path), end_ids
    logger.warning("%s has no tokenizer.json: prompts must be token ids, and outputs have no text", source_path)
    return None, end_ids
