"""A tokenizer in a Hugging Face folder: tokenizer.json, and what the files beside it say about using it.

The rules follow transformers: special tokens are named in tokenizer_config.json (older: special_tokens_map.json), an
explicit `add_bos_token` or `add_eos_token` there replaces tokenizer.json's post-processor, chat_template.jinja comes
before a `chat_template` key, and generation_config.json and config.json may name further end tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from pagedjax.text.parts import DEFAULT_TEMPLATE, TokenizerParts, add_ends, as_id_tuple, union

_TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_ADDED_TOKENS = "added_tokens.json"
_TEMPLATE = "chat_template.jinja"
_TEMPLATE_FOLDER = "additional_chat_templates"
_GENERATION_CONFIG = "generation_config.json"
_MODEL_CONFIG = "config.json"
# Vocabularies that leave the algorithm, or the way text is split, to code outside the folder.
_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")


def read(folder: Path) -> TokenizerParts:
    """Reads the tokenizer of a folder. Raises ValueError with what to provide where a file is missing or wrong."""
    config = _read_json(folder / _TOKENIZER_CONFIG)
    backend = _read_backend(folder)
    special_tokens = _special_tokens(_read_json(folder / _SPECIAL_TOKENS), config)
    _add_missing_tokens(backend, folder, config)
    _mark_special(backend, [*special_tokens.values(), *_extra_special_tokens(config)])
    explicit = {name: config.get(name) for name in ("add_bos_token", "add_eos_token")}
    if any(value is not None for value in explicit.values()):
        add_ends(
            backend,
            special_tokens.get("bos_token") if explicit["add_bos_token"] else None,
            special_tokens.get("eos_token") if explicit["add_eos_token"] else None,
        )
    return TokenizerParts(backend, special_tokens, end_ids(folder), _chat_templates(folder, config))


def write(folder: Path, parts: TokenizerParts) -> None:
    """Writes the files from which `read` gets the same parts; keys it does not own in existing files are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    parts.backend.save(str(folder / _TOKENIZER))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(folder / _TOKENIZER_CONFIG, {**config, **parts.special_tokens})
    (folder / _SPECIAL_TOKENS).unlink(missing_ok=True)
    (folder / _ADDED_TOKENS).unlink(missing_ok=True)
    _write_templates(folder, parts.chat_templates)
    if parts.eos_ids:
        generation = _read_json(folder / _GENERATION_CONFIG)
        _write_json(folder / _GENERATION_CONFIG, {**generation, "eos_token_id": list(parts.eos_ids)})


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / _TOKENIZER
    if not path.is_file():
        others = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
        found = f"only {', '.join(others)}, which does not say how text is split" if others else "no tokenizer files"
        raise ValueError(
            f"{folder} has no {_TOKENIZER} ({found}): add it (transformers writes one: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)), or give the engine your own tokenizer object "
            "with encode and decode"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} cannot be read by tokenizers {tokenizers.__version__}: {error}") from error
    # Settings of a training run that would silently cut or pad prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _token_text(value: Any) -> str | None:
    """A special token as it is written in these files: text, or an object with its text as `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _special_tokens(token_map: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    merged = {**token_map, **config}
    named = {name: _token_text(value) for name, value in merged.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text is not None}


def _extra_special_tokens(config: Mapping[str, Any]) -> list[str]:
    listed = (config.get("added_tokens_decoder") or {}).values()
    extra = [
        config.get("additional_special_tokens"),
        config.get("extra_special_tokens"),
        [entry for entry in listed if entry.get("special")],
    ]
    values = [v for group in extra if group for v in (group.values() if isinstance(group, Mapping) else group)]
    return [text for text in map(_token_text, values) if text is not None]


def _add_missing_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Adds tokens that only tokenizer_config.json or added_tokens.json list, at the ids that they say."""
    listed: dict[int, tokenizers.AddedToken] = {}
    for text, token_id in _read_json(folder / _ADDED_TOKENS).items():
        listed[int(token_id)] = tokenizers.AddedToken(text, normalized=False)
    for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        listed[int(token_id)] = tokenizers.AddedToken(entry["content"], **flags)
    for token_id, token in sorted(listed.items(), key=lambda item: item[0]):
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
        actual = backend.token_to_id(token.content)
        if actual != token_id:
            raise ValueError(
                f"{folder}: token {token.content!r} has id {actual} in {_TOKENIZER} and {token_id} in "
                f"{_TOKENIZER_CONFIG} or {_ADDED_TOKENS}: use files of one checkpoint"
            )


def _mark_special(backend: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Tokens named as special are left out of decoded text, even where tokenizer.json has them as ordinary ones."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for text in dict.fromkeys(texts):
        if text not in special and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def end_ids(folder: Path) -> tuple[int, ...]:
    """End tokens that config.json and generation_config.json name, united."""
    model_config = _read_json(folder / _MODEL_CONFIG)
    values = {
        _MODEL_CONFIG: model_config.get("eos_token_id", (model_config.get("text_config") or {}).get("eos_token_id")),
        _GENERATION_CONFIG: _read_json(folder / _GENERATION_CONFIG).get("eos_token_id"),
    }
    return union(*(as_id_tuple(value, f"eos_token_id in {folder / name}") for name, value in values.items()))


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        templates[DEFAULT_TEMPLATE] = value
    elif isinstance(value, Mapping):
        templates.update(value)
    elif value is not None:
        templates.update({entry["name"]: entry["template"] for entry in value})
    if (folder / _TEMPLATE).is_file():
        templates[DEFAULT_TEMPLATE] = _read_template(folder / _TEMPLATE)
    for path in sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja")):
        templates[path.stem] = _read_template(path)
    return templates


def _read_template(path: Path) -> str:
    with path.open(encoding="utf-8", newline="") as file:  # line ends as they are
        return file.read()


def _write_templates(folder: Path, templates: Mapping[str, str]) -> None:
    extra = folder / _TEMPLATE_FOLDER
    for path in [folder / _TEMPLATE, *extra.glob("*.jinja")]:
        path.unlink(missing_ok=True)
    for name, source in templates.items():
        path = folder / _TEMPLATE if name == DEFAULT_TEMPLATE else extra / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8", newline="")
