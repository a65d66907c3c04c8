"""Convert prompts (text, token IDs, batches of either) to lists of tokens, and check them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, Union

from tercet.data.tokenizers import Tokenizer
from tercet.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Prompts: TypeAlias = Union[str, Sequence[int], Sequence[str], Sequence[Sequence[int]], "Tensor"]


class PromptError(UsageError):
    """An invalid prompt or generation option."""


def is_single(prompts: Prompts) -> bool:
    """Whether this is one prompt, not a batch."""
    if not isinstance(prompts, Sequence):
        return prompts.dim() == 1
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


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
        return tokenizer.encode(prompt)
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    raise PromptError(f"{name} is {type(prompt).__name__}: give text or a list of token IDs")


def _check_tokens(row: list[int], name: str, vocab_size: int) -> None:
    if not row:
        raise PromptError(f"{name} is empty: give at least one token")
    for position, token in enumerate(row):
        if not 0 <= token < vocab_size:
            raise PromptError(
                f"{name}: token {token} at position {position} is outside the vocabulary, 0 to {vocab_size - 1}: "
                "is it from another tokenizer?"
            )
