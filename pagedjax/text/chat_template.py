"""Chat messages to prompt text: a checkpoint's jinja template, run in a sandbox with the names that templates expect.

The environment follows what templates are written for (transformers' `apply_chat_template`): blocks are trimmed,
`break` and `continue` work, `raise_exception` and `strftime_now` exist, and `tojson` leaves non-ASCII and HTML alone.
A template is untrusted code from a checkpoint, so it runs in jinja's immutable sandbox.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Message = Mapping[str, Any]


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training masks; for a prompt it is its body and no more."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it as an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def check_messages(messages: Sequence[Message]) -> None:
    """Refuses what is not a conversation: a non-empty list of mappings, each with a role and something to say.

    Content may be text or a list of parts (mappings), and may be absent only beside other fields such as
    `tool_calls`.

    Raises:
        ValueError: naming the message, what it holds and what it should hold.
    """
    expected = 'expected a list like [{"role": "user", "content": "Hello"}]'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is a {type(messages).__name__}; {expected}")
    if not messages:
        raise ValueError(f"messages is empty; {expected}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] is a {type(message).__name__}, not a mapping; {expected}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"messages[{i}] has role {role!r}; give one as text, such as 'user' ({expected})")
        if content is None:
            if not message.get("tool_calls"):
                raise ValueError(f"messages[{i}] (role {role!r}) has no content; {expected}")
        elif isinstance(content, list | tuple):
            if not all(isinstance(part, Mapping) for part in content):
                raise ValueError(f"messages[{i}] (role {role!r}) has a content part that is not a mapping; {expected}")
        elif not isinstance(content, str):
            raise ValueError(f"messages[{i}] (role {role!r}) has content of type {type(content).__name__}; {expected}")


def render(source: str, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
    """The prompt text of a conversation.

    Args:
        source: the template, in jinja.
        messages: the conversation, oldest first; see `check_messages`.
        add_generation_prompt: ends the prompt with what opens the assistant's turn.
        **variables: what else the template reads: special tokens (`bos_token`, ...), `tools`, `enable_thinking`, ...

    Raises:
        ValueError: the messages are malformed, the template does not parse, or it refuses the conversation.
    """
    check_messages(messages)
    # Templates test keys with `is defined`: a field that is None counts as absent, as it does for the model's own code.
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        return _compile(source).render(messages=plain, add_generation_prompt=add_generation_prompt, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template does not parse (line {error.lineno}): {error.message}") from error
    except jinja2.TemplateError as error:
        roles = [message["role"] for message in messages]
        raise ValueError(f"the chat template refuses a conversation with roles {roles}: {error.message}") from error
    except (TypeError, AttributeError, KeyError, IndexError, ValueError, ArithmeticError) as error:
        raise ValueError(f"the chat template fails: {type(error).__name__}: {error}") from error
