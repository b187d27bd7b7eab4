"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from inferlib.serving.exchange import Exchange
from inferlib.serving.fields import Fields
from inferlib.serving.prompts import chat_tokens
from inferlib.serving.protocol import is_ids, read_messages, read_template, read_tools
from inferlib.serving.service import Service


async def tokenize(service: Service, body: Any, exchange: Exchange) -> dict[str, Any]:
    """Tokenise a text, `prompt`, or a conversation, `messages`, with its tools and options of the chat template."""
    fields = Fields(body)
    service.check_model(fields.take("model", str))
    text, messages = fields.take("prompt", str), fields.take("messages", list)
    shown = fields.take("return_token_strs", bool, False)
    if (text is None) == (messages is None):
        raise fields.wrong("prompt", "or messages: give one of them")
    if text is not None:
        special = fields.take("add_special_tokens", bool, True)
        fields.close()
        tokenizer, written = service.tokenizer, text
        ids = await service.compute(len(text), lambda: tokenizer.encode(written, add_special_tokens=special))
    else:
        fields.refuse({"add_special_tokens": "the chat template writes them"}, (False,))
        tools, template = read_tools(fields), read_template(fields)
        fields.close()
        ids = await chat_tokens(service, read_messages(messages), tools, template)
    answer = {"count": len(ids), "max_model_len": service.llm.llm.config.max_len, "tokens": ids}
    if shown:
        answer["token_strs"] = [service.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    return answer


async def detokenize(service: Service, body: Any, exchange: Exchange) -> dict[str, Any]:
    fields = Fields(body)
    service.check_model(fields.take("model", str))
    ids = fields.take("tokens", list)
    fields.close()
    if not is_ids(ids) or not all(0 <= i < 1 << 31 for i in ids):
        raise fields.wrong("tokens", "must be a list of token ids")
    tokenizer = service.tokenizer
    return {"prompt": await service.compute(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=False))}
