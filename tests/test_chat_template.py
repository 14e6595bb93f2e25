"""Chat templates: rendered as the models were trained, in a sandbox, and every failure a ValueError."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers

from pagedjax.text import Tokenizer
from pagedjax.text.chat_template import render

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "Hi"}]
# The template of SmolLM2-135M-Instruct, whose rendered prompts the reference file has.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("prompt", [p for p in REFERENCE["prompts"] if p.get("messages")], ids=lambda p: p["name"])
def test_prompts_equal_those_of_transformers(prompt: dict[str, Any]) -> None:
    assert render(SMOLLM2, prompt["messages"]) == prompt["prompt_text"]


def test_the_generation_prompt_may_be_left_out() -> None:
    assert render(SMOLLM2, USER) == render(SMOLLM2, USER, add_generation_prompt=False) + "<|im_start|>assistant\n"


def test_blocks_are_trimmed() -> None:
    source = "  {% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n  {% endfor %}\nend"
    assert render(source, USER) == "Hi\nend"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
            "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "013",
        ),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi"}]'),
        ("{{ {'a': '<é你>&\\''} | tojson }}", '{"a": "<é你>&\'"}'),
        ("{{ {'b': 1, 'a': [1]} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": [\n    1\n  ]\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ bos_token }}", "2<s>"),
        ("{% if x is defined %}x{% else %}no x{% endif %}", "no x"),
        ("{% if messages[0].name is defined %}name{% else %}none{% endif %}", "none"),
        ("<b>{{ messages[0].content + '<&>' }}</b>", "<b>Hi<&></b>"),
    ],
)
def test_what_templates_rely_on(source: str, text: str) -> None:
    assert render(source, [{"role": "user", "content": "Hi", "name": None}], bos_token="<s>") == text


def test_the_date_is_today() -> None:
    assert render("{{ strftime_now('%Y') }}", USER) in {str(datetime.datetime.now().year + n) for n in (-1, 0, 1)}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Only user and assistant roles are supported!') }}", "Only user and assistant roles"),
        ("{% for m in messages %}", "does not parse"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages | nofilter }}", "nofilter"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({'content': 'x'}) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_what_goes_wrong_is_a_value_error(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(source, USER)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("Hi", "is a str"),
        ({"role": "user", "content": "Hi"}, "is a dict"),
        (None, "is a NoneType"),
        ([], "empty"),
        (["Hi"], r"messages\[0\] is a str"),
        ([*USER, {"content": "Hi"}], r"messages\[1\] has role None"),
        ([{"role": 3, "content": "Hi"}], "role 3"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": None}], "no content"),
        ([{"role": "user", "content": 5}], "type int"),
        ([{"role": "user", "content": ["Hi"]}], "not a mapping"),
    ],
)
def test_malformed_messages_are_named(messages: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        render(SMOLLM2, messages)


def test_content_may_be_parts_or_tool_calls() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert render("{{ messages[0].content[0].text }}", parts) == "Hi"
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert render("{{ messages[0].content is defined }}{{ messages[0].tool_calls[0].name }}", calls) == "Falsef"


def small_chat(template: str | None, **others: str) -> Tokenizer:
    backend = small_tokenizers.byte_level()
    bos = backend.token_to_id(small_tokenizers.BOS)
    backend.post_processor = small_tokenizers.tokenizers.processors.TemplateProcessing(
        single=[small_tokenizers.BOS, "$A"], pair=None, special_tokens=[(small_tokenizers.BOS, bos)]
    )
    templates = {**({} if template is None else {"default": template}), **others}
    names = {"bos_token": small_tokenizers.BOS, "eos_token": small_tokenizers.EOS}
    return Tokenizer(backend, special_tokens=names, chat_templates=templates)


def test_a_template_that_starts_with_the_begin_token_gives_one() -> None:
    tokenizer = small_chat("{{ bos_token }}{{ messages[0].content }}")
    ids = tokenizer.apply_chat_template(USER)
    assert ids == [tokenizer.bos_id, *b"Hi"]
    # The same text as a raw prompt: the tokenizer adds a begin token, and there is one already.
    assert tokenizer.encode(tokenizer.render_chat(USER)) == ids


def test_a_template_without_a_begin_token_gives_none() -> None:
    assert small_chat("{{ messages[0].content }}").apply_chat_template(USER) == list(b"Hi")


def test_the_named_template_is_used() -> None:
    tokenizer = small_chat("default", tool_use="{{ tools[0] }}", rag="{{ documents | length }}")
    assert tokenizer.render_chat(USER) == "default"
    assert tokenizer.render_chat(USER, tools=["search"]) == "search"
    assert tokenizer.render_chat(USER, template="rag", documents=[1, 2]) == "2"
    assert tokenizer.render_chat(USER, template="{{ eos_token }}{{ thinking }}", thinking="on") == "</s>on"
    assert small_chat("{{ tools is none }}").render_chat(USER) == "True"


def test_without_a_template_the_error_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no default chat template.*template="):
        small_chat(None, rag="x").apply_chat_template(USER)
