"""Small tokenizers of the kinds that checkpoints use, built in memory, with a few hundred tokens each."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

BOS, EOS, TURN = "<s>", "</s>", "<|turn|>"


def byte_level_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in GPT-2's vocabulary, in the order of the bytes.

    Printable Latin-1 stands for itself; the others take the code points from 256 on (Radford et al. 2019, encoder.py).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def byte_level() -> tokenizers.Tokenizer:
    """Ids 0-255 are the bytes, then merges (some end within a character), then three special tokens."""
    alphabet = byte_level_alphabet()
    vocab = {char: byte for byte, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ġ", "Ġ")]
    # Two bytes of the three of most CJK characters, and the two that most emoji begin with.
    merges += [(alphabet[0xE4], alphabet[0xBD]), (alphabet[0xF0], alphabet[0x9F])]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in (BOS, EOS, TURN)])
    return backend


_PIECES = [
    "▁",
    "▁h",
    "h",
    "e",
    "l",
    "o",
    "ll",
    "he",
    "hell",
    "▁hell",
    "▁w",
    "w",
    "r",
    "d",
    "é",
    "你",
    "\ufffd",
    "▁▁",
    "😀",
]


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral decode: "▁" is a space, runs of byte tokens are characters, the first space is removed."""
    texts = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    vocab = {text: i for i, text in enumerate(texts)}
    merges = [("l", "l"), ("h", "e"), ("he", "ll"), ("▁", "h"), ("▁", "hell"), ("▁", "w"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", BOS, EOS)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """A SentencePiece vocabulary whose decoder removes the space of the first token only."""
    vocab = [("<unk>", 0.0), (EOS, 0.0), *((piece, -float(i)) for i, piece in enumerate(_PIECES))]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", EOS)])
    return backend
