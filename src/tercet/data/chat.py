"""Conversations as text: the chat template of a tokenizer, and what of the text counts in the loss."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tercet.data.stream import BadValueError, DataError, DataUsageError, first_line
from tercet.parse import parse_json

Spans = tuple[tuple[int, int], ...]  # ranges of characters

_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")  # marks the assistant's text in a template
# A template may write today's date, and then a resumed run would read other tokens. In training data it is this day.
_SAME_DATE = (
    "{% macro strftime_now(format) %}{{ format|replace('%d', '26')|replace('%m', '07')|replace('%B', 'July')"
    "|replace('%b', 'Jul')|replace('%Y', '2024')|replace('%y', '24')|replace('%A', 'Friday')|replace('%a', 'Fri')"
    "|replace('%H', '12')|replace('%M', '00')|replace('%S', '00') }}{% endmacro +%}"
)
_RENDERING = threading.Lock()  # the library keeps the state of a rendering in its compiled template
_ANSWER = "Tercet's answer"


class ChatError(BadValueError):
    """A conversation that cannot be rendered. The message says why: `its ...`."""


@dataclass(frozen=True)
class ChatTemplate:
    sources: Mapping[str, str]  # by name: "default", and maybe "tool_use" for conversations with tools
    specials: Mapping[str, str]  # bos_token and the like, which templates write

    @classmethod
    def of(cls, files: Mapping[str, str]) -> ChatTemplate | None:
        """The template among the files that come with a tokenizer.json, if there is one."""
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            try:
                settings |= parse_json(files.get(name, "{}"))
            except (TypeError, ValueError) as error:
                raise DataError(f"{name} next to tokenizer.json is damaged ({error}): copy it again") from None
        template = files.get("chat_template.jinja") or settings.get("chat_template")
        if isinstance(template, list):  # of {"name": ..., "template": ...}
            template = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        sources: dict[str, Any] = template if isinstance(template, dict) else {"default": template}
        if not isinstance(sources.get("default"), str):
            return None
        tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
        return cls(sources, {name: text for name, text in texts.items() if isinstance(text, str)})

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr((sorted(self.sources.items()), sorted(self.specials.items()))).encode()).hexdigest()

    @cached_property
    def after_answer(self) -> str:
        """What the template writes after an answer, beginning with the token that ends a turn."""
        question = {"role": "user", "content": "?"}
        text, _ = self.render([question, {"role": "assistant", "content": _ANSWER}])
        return text.rpartition(_ANSWER)[2] if _ANSWER in text else ""

    def render(
        self, messages: Any, tools: Any = None, *, answer: bool = False, today: bool = False
    ) -> tuple[str, Spans]:
        """The text of a conversation, and the ranges that {% generation %} marks in it. Templates run in a sandbox.

        answer: end with the start of the assistant's next turn.
        today: let the template write today's date.
        """
        if not isinstance(messages, list):
            raise ChatError(f"its messages are {type(messages).__name__}, not a list")
        for number, message in enumerate(messages, start=1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                fields = ", ".join(message) if isinstance(message, dict) else type(message).__name__
                raise ChatError(f"its message {number} has no role (it has {fields or 'nothing'})")
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise DataError(
                "chat templates need transformers, which is not installed: pip install 'tercet[hub]'"
            ) from error
        source = self._source(tools)
        try:
            with _RENDERING:
                (text,), marked = render_jinja_template(
                    [messages],
                    tools,
                    chat_template=source if today else _SAME_DATE + source,
                    return_assistant_tokens_mask=bool(_GENERATION.search(source)),
                    add_generation_prompt=answer,
                    **self.specials,
                )
        except ImportError as error:
            raise DataError(f"chat templates cannot be rendered: {first_line(error)}") from error
        except Exception as error:  # a template raises anything
            raise ChatError(f"its chat template fails ({first_line(error)})") from error
        return text, tuple((begin, end) for begin, end in marked[0]) if marked else ()

    def learned(self, messages: Any, tools: Any, first: int, assistant_only: bool) -> tuple[str, Spans]:
        """The text of a conversation, and the ranges of it that count in the loss, which are after message `first`.

        The assistant's turns are those that {% generation %} marks. In a template without it, a turn is what is added
        when its message is: an error where the template renders earlier messages differently when others follow.
        """
        text, marked = self.render(messages, tools)

        def length(count: int, answer: bool) -> int:
            """Characters of the first `count` messages."""
            part, _ = self.render(messages[:count], tools, answer=answer)
            if not text.startswith(part):
                raise ChatError(
                    f"its chat template renders the first {count} messages differently when others follow, so the "
                    "assistant's part is unknown: mark it in the template with {% generation %}"
                )
            return len(part)

        start = length(first, messages[first]["role"] == "assistant") if 0 < first < len(messages) else 0
        if not assistant_only:
            return text, ((start, len(text)),)
        if not _GENERATION.search(self._source(tools)):
            turns = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
            marked = tuple((length(i, True), length(i + 1, False)) for i in turns)
        spans = tuple((max(begin, start), end) for begin, end in marked if max(begin, start) < end)
        if not spans:
            raise ChatError(
                "its messages have no text of the assistant, and data.loss_on=assistant learns nothing else"
            )
        return text, spans

    def _source(self, tools: Any) -> str:
        return self.sources.get("tool_use" if tools else "default") or self.sources["default"]


@dataclass(frozen=True)
class ChatReader:
    """Turns the messages of a record into text."""

    tokenizer: str  # its name
    template: ChatTemplate | None
    assistant_only: bool  # data.loss_on

    def read(self, text: Any, prompt: Any, tools: Any) -> tuple[str, Spans, str] | None:
        """The text of a conversation, what of it counts in the loss, and the messages as JSON; None for other records.

        text, prompt: the fields of a record. A prompt is put first, and excluded from the loss.
        """
        if not (isinstance(text, list) or isinstance(prompt, list) or (self.assistant_only and prompt is not None)):
            if self.assistant_only and isinstance(text, str):
                raise ChatError(
                    "its text is a string, not messages: data.loss_on=assistant needs --data.text_field messages, or "
                    "a question in --data.prompt_field"
                )
            return None
        if self.template is None:
            raise DataUsageError(
                f"tokenizer={self.tokenizer} has no chat template, which messages need: choose one that has "
                "tokenizer_config.json or chat_template.jinja next to its tokenizer.json, or another --data.text_field"
            )
        asked = [] if prompt is None else _messages(prompt, "user")
        answered = _messages(text, "assistant")
        tools = _tools(tools)
        if not answered:
            return "", (), ""
        rendered, spans = self.template.learned(asked + answered, tools, len(asked), self.assistant_only)
        return rendered, spans, json.dumps([asked, answered, tools], ensure_ascii=False, sort_keys=True, default=str)


def _messages(value: Any, role: str) -> list[Any]:
    """Messages, of which a plain text is one."""
    if isinstance(value, (str, list)):
        return [{"role": role, "content": value}] if isinstance(value, str) else value
    raise ChatError(f"its messages are {type(value).__name__}, not a list")


def _tools(value: Any) -> list[Any] | None:
    """Descriptions of functions; parquet files often have them as JSON."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = parse_json(value)
    if value and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise ChatError("its tools are not a list of JSON objects")
    return value or None
