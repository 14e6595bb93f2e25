"""Models from files: Hugging Face folders, GGUF files, this package's Orbax checkpoints, and aliases."""

from pagedjax.loaders.checkpoint import Checkpoint, load_checkpoint, resolve
from pagedjax.loaders.hub import FetchError
from pagedjax.loaders.tokenizer import load_tokenizer

__all__ = ["Checkpoint", "FetchError", "load_checkpoint", "load_tokenizer", "resolve"]
