"""Tokens into text as they come: whole characters only, and nothing that may yet turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tercet.data.tokenizers import Tokenizer

# A character is at most four bytes: what is still unreadable after so many tokens is no character to wait for.
_PATIENCE = 4
_UNREADABLE = "\ufffd"


class TextStream:
    """`push` gives the text that a token makes certain; `end` the rest. `stopped` says that a stop string came."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(s for s in stop if s)
        self._tokens: list[int] = []
        # Text of a few tokens depends on the token before them (spaces of word pieces): decoding begins one earlier.
        self._from, self._told = 0, 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        self._tokens.append(token)
        known = self._tokenizer.decode(self._tokens[self._from : self._told])
        text = self._tokenizer.decode(self._tokens[self._from :])
        if text.endswith(_UNREADABLE) and len(self._tokens) - self._told < _PATIENCE:
            return ""
        self._from, self._told = self._told, len(self._tokens)
        return self._release(text[len(known) :])

    def end(self) -> str:
        """What was held back and will not go on."""
        if self.stopped:
            return ""
        known = self._tokenizer.decode(self._tokens[self._from : self._told])
        rest = self._tokenizer.decode(self._tokens[self._from :])[len(known) :]
        text = self._release(rest) + ("" if self.stopped else self._held)
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
