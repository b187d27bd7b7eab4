from __future__ import annotations

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from inferlib.chat import ChatError, ChatTemplate, checked_kwargs
from inferlib.checkpoint.gguf import GGUFCheckpoint
from inferlib.checkpoint.known import resolve

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = """{{- bos_token }}
{%- if tools is not none %}
    {{- "Tools: " }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
        {{- tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
<{{ message.role }} {{ ns.count }}>
    {% generation %}
{{ message['content'] | trim }}{{ eos_token }}
    {% endgeneration %}
    {% if ns.count == 2 %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now('%Y') | length }}
{% if thinking is defined and thinking %}think{% endif %}"""
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.content }}]{% endfor %}"
)
MESSAGES = [
    {"role": "user", "content": "  <b> \u4f60\u597d & 'quotes'\n"},
    {"role": "assistant", "content": "\U0001f642"},
    {"role": "user", "content": "x"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "<\u00e9>", "parameters": {"b": 1, "a": [1.5, None]}},
    }
]


@pytest.mark.parametrize("template", [CHATML, BLOCKS, STRICT])
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"tools": TOOLS, "thinking": True}])
def test_templates_equal_transformers(template, options):
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.BPE()), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    ours = ChatTemplate(template, "<|im_start|>", "<|im_end|>").render(MESSAGES, **options)
    keywords = {"add_generation_prompt": True, **options}
    assert ours == reference.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, **keywords)


@pytest.mark.parametrize("template", [CHATML, BLOCKS])
@pytest.mark.parametrize(
    "content", ["begun", "  begun and  spaced  ", [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]]
)
def test_a_continued_message_equals_transformers(template, content):
    """Where the template keeps the spaces around a message, and where it trims them."""
    if isinstance(content, list):
        template = "{% for m in messages %}<|im_start|>{% for p in m.content %}{{ p.text }}{% endfor %}|{% endfor %}"
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.BPE()), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    messages = [{"role": "user", "content": "begun"}, {"role": "assistant", "content": content}]
    ours = ChatTemplate(template, "<|im_start|>", "<|im_end|>").render(messages, continue_final_message=True)
    expected = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True
    )
    assert ours == expected
    assert messages[1]["content"] == content


def test_only_one_of_continuing_and_beginning():
    template = ChatTemplate(CHATML, None, None)
    assert template.render(MESSAGES[:1], add_generation_prompt=True) == template.render(MESSAGES[:1])
    with pytest.raises(ChatError, match="give one of them"):
        template.render(MESSAGES, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(ChatError, match="must be True or False, got 1 and False"):
        template.render(MESSAGES, add_generation_prompt=1)
    with pytest.raises(ChatError, match="a final message with text"):
        template.render([{"role": "assistant", "tool_calls": [{"name": "f"}]}], continue_final_message=True)
    with pytest.raises(ChatError, match="leaves out the final message's end"):
        ChatTemplate("{{ messages[0].content[:3] }}", None, None).render(MESSAGES, continue_final_message=True)
    for tools in ("x", [1], {}):
        with pytest.raises(ChatError, match="tools must be a list of JSON schemas"):
            template.render(MESSAGES, tools=tools)


def test_a_template_may_fail_in_any_way():
    for source in ("{{ 1 / 0 }}", "{{ [1][messages[0].role | length] + none }}", "{{ 'x'.encode('nope') }}"):
        with pytest.raises(ChatError, match="refuses these messages") as error:
            ChatTemplate(source, None, None).render(MESSAGES)
        assert len(str(error.value).splitlines()) == 1


def test_options_of_a_template():
    assert checked_kwargs(None, {}) == {}
    assert checked_kwargs({"enable_thinking": False}, {"tools": None}) == {"enable_thinking": False}
    for wrong in ([1], "x", {1: 2}):
        with pytest.raises(ChatError, match="chat_template_kwargs must map names"):
            checked_kwargs(wrong, {})
    for name in ("messages", "tools", "mine"):
        with pytest.raises(ChatError, match=f"has '{name}', which is no option of the template itself"):
            checked_kwargs({name: 1}, {"mine": 2})


def test_template_refusals():
    with pytest.raises(ChatError, match="roles must alternate"):
        ChatTemplate(STRICT, None, None).render(MESSAGES[1:])
    with pytest.raises(ChatError, match="not valid, line 2"):
        ChatTemplate("\n{% if %}", None, None).render(MESSAGES)
    with pytest.raises(ChatError, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", None, None).render(MESSAGES)
    with pytest.raises(ChatError, match="refuses these messages"):
        ChatTemplate("{{ 'a' + messages[0].content }}", None, None).render(
            [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "must be a list .* got str"),
        ({"role": "user", "content": "x"}, "must be a list .* got dict"),
        (3, "must be a list"),
        ([], "messages are empty"),
        (["hello"], "message 0 must be"),
        ([*MESSAGES, {"content": "x"}], 'message 3 needs a "role"'),
        ([{"role": "user"}], 'message 0 needs a "content" string, got None'),
        ([{"role": "user", "content": 3}], 'message 0 needs a "content" string, got 3'),
    ],
)
def test_malformed_messages(messages, message):
    with pytest.raises(ChatError, match=message):
        ChatTemplate(CHATML, None, None).render(messages)


def test_a_call_of_tools_needs_no_content():
    calls = [{"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert ChatTemplate("{{ messages[0].tool_calls[0].name }}", None, None).render(calls) == "f"


@pytest.mark.slow
def test_smollm2_template_equals_transformers():
    checkpoint = GGUFCheckpoint(resolve("smollm2"))
    template = checkpoint.tokenizer().chat_template
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.BPE()),
        chat_template=checkpoint.metadata["tokenizer.chat_template"],
    )
    for messages in (MESSAGES, [{"role": "system", "content": "Be brief."}, *MESSAGES]):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == expected
