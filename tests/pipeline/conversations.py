"""Conversations and the way in which engines render them."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

from pipeline.model.tokens.chat_template import chat_template

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "U"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}


def assistant(content: str = "A", **fields: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **fields}


def call(name: str, arguments: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def render(
    family: str, messages: list[Any], *, add_generation_prompt: bool = True, **variables: Any
) -> str:
    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    # The settings and filters with which chat templates are run (transformers, llama.cpp).
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(chat_template(family)).render(
        messages=messages,
        bos_token=BOS,
        eos_token=EOS,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
