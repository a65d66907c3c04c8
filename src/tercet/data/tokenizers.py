"""Text to token numbers and back: bytes, a tokenizer.json, or a tokenizer of the hub."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tercet.data.stream import DataError, DataUsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|eot_id|>", "<|im_end|>")


class Tokenizer(Protocol):
    """What the data side and the trainer ask of a tokenizer."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """Equal fingerprints give equal tokens: kept in shards and cursors."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Tokens of each UTF-8 text, ended by EOS, as unsigned integers of `dtype`."""

    def objection(self, text: bytes) -> str | None:
        """Why this text cannot be encoded without loss; None if it can."""

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every token."""


def smallest_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


class ByteTokenizer:
    """256 tokens: the bytes of UTF-8. EOS is byte 0, which text never holds, so an untrained model's loss is ln 256."""

    name = "byte"
    vocab_size = 256
    eos_id = 0
    fingerprint = "byte-256-eos-0"
    dtype = np.dtype("u1")

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        if (reason := self.objection(data)) is not None:
            raise DataError(f"text of {len(data)} bytes {reason}: remove it")
        return list(data)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.eos_id).decode(errors="replace")

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text + b"\0", dtype=np.uint8) for text in texts]

    def objection(self, text: bytes) -> str | None:
        at = text.find(b"\0")
        return None if at < 0 else f"has a zero byte at {at}, which means end of document to the byte tokenizer"


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library, held to: no truncation, no padding, no specials read out of text."""

    def __init__(self, library: Library, name: str, eos_token: str = "") -> None:
        # A tokenizer.json may carry truncation: it would cut documents without a word.
        library.no_truncation()
        library.no_padding()
        # "<|endoftext|>" inside a document is text about tokenizers, not an end of document.
        library.encode_special_tokens = True
        self._library = library
        self.name = name
        self.vocab_size = _largest_id(library) + 1
        self.eos_id = _find_eos(library, name, eos_token)
        self.dtype = smallest_dtype(self.vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._library.to_str()}\n{self.eos_id}".encode()).hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=True)

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        encodings = self._library.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        end = [self.eos_id]
        return [np.array(encoding.ids + end, dtype=self.dtype) for encoding in encodings]

    def objection(self, text: bytes) -> str | None:
        return None

    def to_str(self) -> str:
        """Its tokenizer.json."""
        return self._library.to_str(pretty=True)

    def save(self, path: Path) -> None:
        path.write_text(self.to_str(), encoding="utf-8")


def load_tokenizer(spec: str, eos_token: str = "") -> Tokenizer:
    """`byte`, a tokenizer.json (or the folder that holds it), or a name on the hub such as `gpt2`."""
    if spec == "byte":
        if eos_token:
            raise DataUsageError(f"eos_token={eos_token!r} with tokenizer=byte: its EOS is byte 0; drop eos_token")
        return ByteTokenizer()
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"tokenizer={spec} needs the tokenizers library, which is not installed: pip install 'tercet[data]'"
        ) from error
    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        return _from_file(path, str(path), eos_token)
    if _looks_like_path(spec):
        raise DataUsageError(
            f"tokenizer={spec}: there is no {path}: give a tokenizer.json, a folder that holds one, a hub name, or byte"
        )
    from tercet.data.hub import fetch_model_file, first_line, refused

    try:
        fetched = fetch_model_file(spec, "tokenizer.json")
    except Exception as error:
        kind = DataUsageError if refused(error) else DataError
        raise kind(
            f"tokenizer={spec} is no file here and could not be fetched from the hub ({first_line(error)}): "
            "check the name and the network, or give a tokenizer.json, or train one with `tercet data train-tokenizer`"
        ) from error
    return _from_file(Path(fetched), spec, eos_token)


def _from_file(path: Path, name: str, eos_token: str) -> LibraryTokenizer:
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"tokenizer={name}: {path} is not a readable tokenizer.json: {error}") from error
    return LibraryTokenizer(library, name, eos_token)


def _looks_like_path(spec: str) -> bool:
    return spec.endswith(".json") or spec.startswith((".", "~", os.sep)) or spec.count("/") > 1


def _largest_id(library: Library) -> int:
    # Not get_vocab_size: that counts entries, and ids may have holes.
    vocabulary = library.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError("the tokenizer has no entries: train it, or take another")
    return max(vocabulary.values())


def _find_eos(library: Library, name: str, eos_token: str) -> int:
    if eos_token:
        found = library.token_to_id(eos_token)
        if found is None:
            raise DataUsageError(
                f"eos_token={eos_token!r} is not in the vocabulary of {name}; its special tokens: {_specials(library)}"
            )
        return found
    for candidate in EOS_NAMES:
        if (found := library.token_to_id(candidate)) is not None:
            return found
    raise DataUsageError(
        f"tokenizer {name} has none of the usual end-of-document tokens ({', '.join(EOS_NAMES)}): "
        f"name it with --data.eos_token; its special tokens: {_specials(library)}"
    )


def _specials(library: Library) -> str:
    names = [str(t.content) for t in library.get_added_tokens_decoder().values() if t.special]
    return ", ".join(names[:20]) or "none"
