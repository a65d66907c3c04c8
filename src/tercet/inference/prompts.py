"""What a person gives as prompts becomes lists of tokens; what cannot is refused in one line."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tercet.data.tokenizers import Tokenizer
from tercet.errors import UsageError

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Tensor


class PromptError(UsageError):
    """A prompt that the model cannot read."""


def is_single(prompts: Prompts) -> bool:
    """One prompt rather than a batch of them."""
    if isinstance(prompts, Tensor):
        return prompts.dim() == 1
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def as_tokens(prompts: Prompts, tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """Tokens of every prompt, each at least one, all within the vocabulary."""
    listed = prompts.tolist() if isinstance(prompts, Tensor) else prompts
    batch = [listed] if is_single(prompts) else list(listed)
    if not batch:
        raise PromptError("no prompt was given: give at least one")
    rows = [_one(prompt, name, tokenizer) for prompt, name in zip(batch, _names(len(batch)), strict=True)]
    for row, name in zip(rows, _names(len(batch)), strict=True):
        _check(row, name, vocab_size)
    return rows


def check_room(rows: list[list[int]], max_new_tokens: int, context: int | None) -> int:
    """Tokens that the longest row will hold; an error if the model has not learnt to read so many."""
    if max_new_tokens < 1:
        raise PromptError(f"max_new_tokens={max_new_tokens} must be at least 1")
    sizes = [len(row) for row in rows]
    longest = max(sizes)
    needed = longest + max_new_tokens
    if context is not None and needed > context:
        name = _names(len(rows))[sizes.index(longest)]
        fits = f"ask for at most {context - longest} new tokens, " if longest < context else "shorten it, "
        raise PromptError(
            f"{name} has {longest} tokens, with max_new_tokens={max_new_tokens} that is {needed}, "
            f"over the context of {context} that the model was trained with: {fits}"
            f"or say context={needed} (--context {needed}) to read further than it has learnt to"
        )
    return needed


def _names(count: int) -> list[str]:
    return ["the prompt"] if count == 1 else [f"prompt {i}" for i in range(count)]


def _one(prompt: object, name: str, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError(f"{name} is text, and there is no tokenizer: give token numbers, or tokenizer=…")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"{name} is not text: character {error.start} ({prompt[error.start]!r}) stands for a byte that is no "
                "UTF-8; give UTF-8"
            ) from None
        return tokenizer.encode(prompt)
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    raise PromptError(f"{name} is {type(prompt).__name__}: give text, or a list of token numbers")


def _check(row: list[int], name: str, vocab_size: int) -> None:
    if not row:
        raise PromptError(f"{name} is empty: give at least one token to go on from")
    for place, token in enumerate(row):
        if not 0 <= token < vocab_size:
            raise PromptError(
                f"{name}: token {token} at place {place} is outside the vocabulary, 0 to {vocab_size - 1}: "
                "is it from another tokenizer?"
            )
