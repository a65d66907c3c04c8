"""Convert prompts (text, conversations, token IDs, batches of them) to lists of tokens, and check them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from tercet.data.tokenizers import ChatError, LibraryTokenizer, Tokenizer
from tercet.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Conversation: TypeAlias = Sequence[Mapping[str, Any]]  # messages: {"role": ..., "content": ...}
Prompts: TypeAlias = Union[
    str, Sequence[int], Conversation, Sequence[str], Sequence[Sequence[int]], Sequence[Conversation], "Tensor"
]


class PromptError(UsageError):
    """An invalid prompt or generation option."""


def is_single(prompts: Prompts) -> bool:
    """Whether this is one prompt, not a batch."""
    if not isinstance(prompts, Sequence):
        return prompts.dim() == 1
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, Mapping)))


def end_tokens(prompts: Prompts, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end an answer: EOS, and what ends the assistant's turn in a conversation."""
    if tokenizer is None:
        return ()
    first = prompts[0] if isinstance(prompts, Sequence) and len(prompts) else None
    chat = _is_conversation(prompts) or _is_conversation(first)
    turn_end = tokenizer.turn_end if chat and isinstance(tokenizer, LibraryTokenizer) else None
    return (tokenizer.eos_id,) if turn_end in (None, tokenizer.eos_id) else (tokenizer.eos_id, turn_end)


def _is_conversation(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def tokenize_prompts(prompts: Prompts, tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """The tokens of every prompt: at least one each, all within the vocabulary."""
    listed = prompts if isinstance(prompts, Sequence) else prompts.tolist()
    batch = [listed] if is_single(prompts) else list(listed)
    if not batch:
        raise PromptError("no prompt given: give at least one")
    names = _names(len(batch))
    rows = [_tokenize(prompt, name, tokenizer) for prompt, name in zip(batch, names, strict=True)]
    for row, name in zip(rows, names, strict=True):
        _check_tokens(row, name, vocab_size)
    return rows


def required_context(rows: list[list[int]], max_new_tokens: int, context: int | None) -> int:
    """Tokens of the longest prompt plus its answer; raises PromptError if that exceeds `context`."""
    sizes = [len(row) for row in rows]
    longest = max(sizes)
    needed = longest + max_new_tokens
    if context is not None and needed > context:
        name = _names(len(rows))[sizes.index(longest)]
        fits = f"ask for at most {context - longest} new tokens, " if longest < context else "shorten it, "
        raise PromptError(
            f"{name} has {longest} tokens; with max_new_tokens={max_new_tokens} that makes {needed}, "
            f"over the context of {context}: {fits}or allow it with context={needed} (--context {needed})"
        )
    return needed


def _names(count: int) -> list[str]:
    return ["the prompt"] if count == 1 else [f"prompt {i}" for i in range(count)]


def _tokenize(prompt: object, name: str, tokenizer: Tokenizer | None) -> list[int]:
    if _is_conversation(prompt):
        prompt = _render(prompt, name, tokenizer)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError(f"{name} is text, but there is no tokenizer: give token IDs, or tokenizer=…")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"{name} is not valid UTF-8: character {error.start} ({prompt[error.start]!r}) is a lone surrogate; "
                "give UTF-8 text"
            ) from None
        return tokenizer.encode(prompt, specials=True)
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    raise PromptError(f"{name} is {type(prompt).__name__}: give text or a list of token IDs")


def _render(messages: Any, name: str, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None or tokenizer.chat is None:
        which = "there is no tokenizer" if tokenizer is None else f"tokenizer {tokenizer.name} has no chat template"
        raise PromptError(
            f"{name} is a conversation, but {which}: put tokenizer_config.json or chat_template.jinja next to its "
            "tokenizer.json, or give plain text"
        )
    try:
        return tokenizer.chat.render(list(messages), answer=True, today=True)[0]
    except ChatError as error:
        raise PromptError(f"{name} cannot be rendered: {error}") from None


def _check_tokens(row: list[int], name: str, vocab_size: int) -> None:
    if not row:
        raise PromptError(f"{name} is empty: give at least one token")
    for position, token in enumerate(row):
        if not 0 <= token < vocab_size:
            raise PromptError(
                f"{name}: token {token} at position {position} is outside the vocabulary, 0 to {vocab_size - 1}: "
                "is it from another tokenizer?"
            )
