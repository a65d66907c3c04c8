"""Several streams as one, by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tercet.data.stream import Cursor, Document, Documents, DocumentStream


class MixtureStream:
    """The next document comes from the part that is furthest behind its share of the tokens. No dice: the shares hold
    from the first documents on, and the cursor is the parts' cursors and token counts.

    If a part ends (exhaustion=stop), so does the mixture: going on would quietly change the shares.
    """

    def __init__(self, parts: Mapping[str, tuple[float, DocumentStream]]) -> None:
        self._parts = dict(parts)

    @property
    def identity(self) -> dict[str, Any]:
        return {name: {"weight": weight, **stream.identity} for name, (weight, stream) in self._parts.items()}

    @property
    def bad_records(self) -> list[str]:
        return [message for _, stream in self._parts.values() for message in stream.bad_records]

    def documents(self, cursor: Cursor | None = None) -> Documents:
        names = list(self._parts)
        tokens: dict[str, int] = dict(cursor["tokens"]) if cursor else dict.fromkeys(names, 0)
        cursors: dict[str, Cursor | None] = dict(cursor["parts"]) if cursor else dict.fromkeys(names)
        open_parts = {name: self._parts[name][1].documents(cursors[name]) for name in names}
        try:
            while True:
                name = min(names, key=lambda part: tokens[part] / self._parts[part][0])
                document = next(open_parts[name], None)
                if document is None:
                    return
                tokens[name] += len(document.tokens)
                cursors[name] = document.cursor
                here: Cursor = {"tokens": dict(tokens), "parts": dict(cursors)}
                yield Document(document.tokens, document.loss, here)
        finally:
            for part in open_parts.values():
                part.close()
