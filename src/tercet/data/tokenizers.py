"""Tokenizers: bytes, a tokenizer.json file, or a tokenizer from the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tercet.config.data import looks_like_path
from tercet.config.load import DEFAULT, Loaded
from tercet.data.chat import ChatTemplate, Spans
from tercet.data.hub import fetch_model_file, is_permanent
from tercet.data.stream import DataError, DataUsageError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|eot_id|>", "<|im_end|>")

TOKENIZER = "tokenizer.json"
# Next to a tokenizer.json from Hugging Face; `tercet import hf` writes the last one, a copy of config.json. Runs keep
# all of them for `tercet export hf`.
GENERATION, SOURCE_CONFIG = "generation_config.json", "source_config.json"
TRANSFORMERS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
                      "chat_template.json", GENERATION, SOURCE_CONFIG)  # fmt: skip
ENCODED_AT_ONCE = 1 << 20  # bytes of text; the library takes more than 100 times their memory
CONTEXT = 4096  # bytes that decide whether a long text can be cut between them

CHECKED_DOCUMENTS, CHECKED_BYTES = 32, 2048  # for `check_round_trip`: the first documents, and how much of each


def smallest_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


class ByteTokenizer:
    """256 tokens: the bytes of UTF-8. EOS is byte 0, which text does not contain, so ln 256 is the initial loss."""

    name = "byte"
    vocab_size = 256
    eos_id = 0
    fingerprint = "byte-256-eos-0"
    dtype = np.dtype("u1")
    chat = None

    def encode(self, text: str, specials: bool = False) -> list[int]:
        data = text.encode()
        if (reason := self.why_not_encodable(data)) is not None:
            raise DataError(f"text of {len(data)} bytes {reason}: remove it")
        return list(data)

    def decode(self, ids: Sequence[int], specials: bool = False) -> str:
        # a model may have more tokens than bytes: they become the replacement character, as any invalid byte does
        return bytes(min(i, 255) for i in ids if i != self.eos_id).decode(errors="replace")

    def encode_documents(self, texts: Sequence[bytes], specials: bool = False) -> list[np.ndarray]:
        return [np.frombuffer(text + b"\0", dtype=np.uint8) for text in texts]

    def why_not_encodable(self, text: bytes) -> str | None:
        """Why this text cannot be encoded losslessly; None if it can."""
        at = text.find(b"\0")
        return None if at < 0 else f"has a zero byte at {at}, which is the byte tokenizer's EOS"


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library, without truncation and padding. Special tokens are text in documents,
    tokens in prompts and conversations."""

    def __init__(
        self, library: Library, name: str, eos_token: str = "", files: Mapping[str, str] | None = None
    ) -> None:
        """files: the text of its tokenizer.json and of the TRANSFORMERS_FILES next to it, by name; None: it is new."""
        # A tokenizer.json may enable truncation, which would silently cut documents.
        library.no_truncation()
        library.no_padding()
        # "<|endoftext|>" inside a document is ordinary text, not the end of the document.
        library.encode_special_tokens = True
        self._library = library
        self.name = name
        self.files = files or {TOKENIZER: library.to_str(pretty=True)}
        ids = library.get_vocab(with_added_tokens=True).values()  # get_vocab_size counts them, but there may be gaps
        if not ids:
            raise DataError("the tokenizer has no entries: train it, or use another one")
        self.vocab_size = max(ids) + 1
        self.eos_id = _find_eos(library, name, eos_token)
        self.dtype = smallest_dtype(self.vocab_size)  # holds every token

    @cached_property
    def fingerprint(self) -> str:
        """Tokenizers with equal fingerprints give equal tokens. Saved in shards and cursors."""
        return hashlib.sha256(f"{self._library.to_str()}\n{self.eos_id}".encode()).hexdigest()[:32]

    def token(self, id_: int) -> str | None:
        """Its text; None if there is no such token."""
        return self._library.id_to_token(id_)

    def same_tokens(self, other: Tokenizer) -> bool:
        """Whether a text has the same tokens with the other tokenizer, which may end documents with another EOS."""
        return isinstance(other, LibraryTokenizer) and self._encoding() == other._encoding() | {"eos_id": self.eos_id}

    def encodes_as(self, path: Path, fingerprint: str, specials: bool = False) -> bool:
        """Whether texts have the same tokens with the tokenizer.json at `path`, if that still has this fingerprint.
        specials: including special tokens."""
        try:
            other = _from_file(path, str(path), self.token(self.eos_id) or "")
        except DataError:  # unreadable, or without this EOS
            return False
        return other.fingerprint == fingerprint and other._encoding(specials) == self._encoding(specials)

    def _encoding(self, specials: bool = False) -> dict[str, Any]:
        """What decides the tokens of a text: not the decoder, nor the post-processor that adds special tokens, which is
        not applied to texts; the special tokens themselves only where texts have them."""
        parts = json.loads(self._library.to_str())
        added = [token for token in parts["added_tokens"] if specials or not token["special"]]
        names = ("model", "normalizer", "pre_tokenizer")
        return {name: parts[name] for name in names} | {"added_tokens": added, "eos_id": self.eos_id}

    @cached_property
    def _parser(self) -> Library:
        """The same tokenizer, which makes special tokens of their strings, as transformers does."""
        from tokenizers import Tokenizer as Library

        parser: Any = Library.from_str(self._library.to_str())
        parser.post_processor = None  # it may cut whitespace from the offsets of tokens
        return parser

    @cached_property
    def chat(self) -> ChatTemplate | None:
        return ChatTemplate.of(self.files)

    @cached_property
    def turn_end(self) -> int | None:
        """The special token that ends the assistant's turn in a conversation."""
        ids = self.encode(self.chat.after_answer, specials=True)[:1] if self.chat else []
        token = self._library.get_added_tokens_decoder().get(ids[0]) if ids else None
        return ids[0] if token is not None and token.special else None

    def encode(self, text: str, specials: bool = False) -> list[int]:
        return (self._parser if specials else self._library).encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], specials: bool = False) -> str:
        return self._library.decode(list(ids), skip_special_tokens=not specials)

    def encode_documents(self, texts: Sequence[bytes], specials: bool = False) -> list[np.ndarray]:
        """Tokens of each UTF-8 text, followed by EOS, of type `dtype`."""
        library = self._parser if specials else self._library
        encoded: list[np.ndarray] = []
        group: list[bytes] = []
        for i, text in enumerate(texts):
            if len(text) > ENCODED_AT_ONCE:
                encoded.append(
                    np.concatenate([*self._encode_long(text, specials), np.array([self.eos_id], self.dtype)])
                )
                continue
            group.append(text)
            if i + 1 == len(texts) or sum(map(len, group)) + len(texts[i + 1]) > ENCODED_AT_ONCE:
                encodings = library.encode_batch_fast([t.decode() for t in group], add_special_tokens=False)
                encoded += [np.array([*encoding.ids, self.eos_id], dtype=self.dtype) for encoding in encodings]
                group = []
        return encoded

    def _encode_long(self, text: bytes, specials: bool) -> Iterator[np.ndarray]:
        """The tokens of `text`, a piece at a time: each is encoded behind the end of the one before it."""
        before, begin = b"", 0
        while begin < len(text):
            end = self._cut(text, begin + ENCODED_AT_ONCE, specials)
            ids = self._ids(before + text[begin:end], specials)[len(self._ids(before, specials)) :]
            yield np.array(ids, dtype=self.dtype)
            before, begin = text[end - CONTEXT : end], end

    def _cut(self, text: bytes, end: int, specials: bool) -> int:
        """A place before `end`, if possible, where what follows does not change the tokens before it."""
        while end < len(text):
            cuts: list[int] = []
            for mark, skip in ((b"\n", 1), (b" ", 0)):  # a line keeps its end; a space belongs to the next word
                at = end
                for _ in range(8):
                    if (at := text.rfind(mark, end - ENCODED_AT_ONCE // 2, at)) < 0:
                        break
                    cuts.append(at + skip)
            cuts += [at for at in range(end, end - 64, -1) if text[at] & 0xC0 != 0x80]  # between characters
            for cut in cuts:
                before = self._ids(text[cut - CONTEXT : cut], specials)
                if before == self._ids(text[cut - CONTEXT : cut + CONTEXT], specials)[: len(before)]:
                    return cut
            end += ENCODED_AT_ONCE
        return len(text)

    def _ids(self, text: bytes, specials: bool) -> list[int]:
        """Tokens of a part of a text, which may begin or end inside a character."""
        library = self._parser if specials else self._library
        return library.encode_batch_fast([text.decode(errors="ignore")], add_special_tokens=False)[0].ids

    def encode_chats(self, chats: Sequence[tuple[bytes, Spans]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens of each rendered conversation, ending with one EOS, and which of them count in the loss: those that
        have a character in the spans."""
        encoded: list[tuple[np.ndarray, np.ndarray]] = []
        group: list[str] = []
        size = 0
        for i, (rendered, _) in enumerate(chats):  # in small groups, for the library's threads
            group.append(rendered.decode())
            size += len(rendered)
            if i + 1 == len(chats) or size + len(chats[i + 1][0]) > ENCODED_AT_ONCE:
                encodings = self._parser.encode_batch(group, add_special_tokens=False)
                first = i + 1 - len(group)
                for encoding, (text, spans) in zip(encodings, chats[first : i + 1], strict=True):
                    encoded.append(self._learned(encoding, len(text.decode()), spans))
                group, size = [], 0
        return encoded

    def _learned(self, encoding: Any, length: int, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a conversation of `length` characters, and which of them count in the loss."""
        first, last = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        learned = np.zeros(len(first), dtype=bool)
        for begin, end in spans:
            learned |= (first < end) & (last > begin)
        ids = encoding.ids
        if ids[-1:] != [self.eos_id]:
            ids, learned = [*ids, self.eos_id], np.append(learned, spans[-1][1] == length)
        return np.array(ids, dtype=self.dtype), learned

    def why_not_encodable(self, text: bytes) -> str | None:
        return None


Tokenizer = ByteTokenizer | LibraryTokenizer


def text_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """UTF-8 bytes of the text of these tokens, which may begin or end inside a character."""
    if isinstance(tokenizer, ByteTokenizer):
        return sum(i != tokenizer.eos_id for i in ids)
    return len(tokenizer.decode(ids).encode())


def check_round_trip(tokenizer: Tokenizer, documents: Sequence[bytes], max_lost: float) -> None:
    """Raise if more than `max_lost` of the characters at the start of `documents` are lost by encoding and decoding."""
    total, lost = 0, Counter[str]()
    for document in documents if max_lost < 1 else ():
        text = document[:CHECKED_BYTES].decode(errors="ignore")
        decoded = tokenizer.decode(tokenizer.encode(text))
        before = Counter(text) if decoded == text else _characters(text)
        total += before.total()
        if decoded != text:
            lost += before - _characters(decoded)
    if (share := lost.total() / max(1, total)) > max_lost:
        examples = " ".join(character for character, _ in lost.most_common(5))
        raise DataError(
            f"tokenizer={tokenizer.name} loses {100 * share:.1f}% of the characters in the first documents (such as "
            f"{examples}), data.max_lost_text={max_lost:g} allows {100 * max_lost:g}%: use a tokenizer for this text, "
            f"or accept the loss with --data.max_lost_text {min(1.0, 1.5 * share):.2g}"
        )


def _characters(text: str) -> Counter[str]:
    """Characters with their counts, without what tokenizers normalize: case, accents, whitespace, control codes."""
    folded = unicodedata.normalize("NFKD", text).casefold()
    return Counter(c for c in folded if unicodedata.category(c)[0] not in "MZC")


def load_tokenizer(spec: str, eos_token: str = "") -> Tokenizer:
    """Load `byte`, a tokenizer.json (or a folder with one), or a hub model's tokenizer such as `gpt2`."""
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
        if not path.exists():
            raise DataUsageError(
                f"tokenizer={spec}: this local folder has no tokenizer.json: give --data.tokenizer another folder, or "
                "train one with `tercet data train-tokenizer`"
            )
    if path.is_file():
        return _from_file(path, str(path), eos_token)
    if looks_like_path(spec):
        raise DataUsageError(
            f"tokenizer={spec}: {path} does not exist: give --data.tokenizer a tokenizer.json, a folder with one, a "
            "hub name or byte, or train one with `tercet data train-tokenizer`"
        )
    try:
        fetched = fetch_model_file(spec, "tokenizer.json")
    except Exception as error:
        kind = DataUsageError if is_permanent(error) else DataError
        raise kind(
            f"tokenizer={spec} is not a local file and cannot be fetched from the hub ({first_line(error)}): "
            "check the name and the network, or train one with `tercet data train-tokenizer`"
        ) from error
    for name in ("tokenizer_config.json", "chat_template.jinja"):  # kept next to it by the hub's cache
        with contextlib.suppress(Exception):  # few models have both
            fetch_model_file(spec, name)
    return _from_file(Path(fetched), spec, eos_token)


def fit_vocabulary(loaded: Loaded, saved: Callable[[], Path | None] = lambda: None) -> Loaded:
    """Set model.vocab_size to the tokenizer's, rounded up to 64, if the user chose a tokenizer but no size.

    `saved`: where the run to resume keeps its tokenizer.json, which counts if it exists.
    """
    config, origins = loaded.config, loaded.origins
    size, tokenizer = origins["model.vocab_size"], origins["data.tokenizer"]
    if tokenizer in (DEFAULT, size) or not (size == DEFAULT or size.startswith("preset ")):
        return loaded
    copy = saved()
    spec = str(copy) if copy is not None and copy.is_file() else config.data.tokenizer
    vocab = load_tokenizer(spec, config.data.eos_token).vocab_size
    model = config.model.model_copy(update={"vocab_size": -(-vocab // 64) * 64})
    return replace(
        loaded,
        config=config.model_copy(update={"model": model}),
        origins=origins | {"model.vocab_size": "tokenizer"},
    )


def _from_file(path: Path, name: str, eos_token: str) -> LibraryTokenizer:
    from tokenizers import Tokenizer as Library

    reading, files = path, {}
    try:
        library = Library.from_file(str(path))
        files[TOKENIZER] = path.read_bytes().decode()
        for reading in (path.parent / other for other in TRANSFORMERS_FILES if path.name == TOKENIZER):
            if reading.is_file():
                files[reading.name] = reading.read_bytes().decode()
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"tokenizer={name}: {reading} is not a readable {reading.name}: {error}") from error
    return LibraryTokenizer(library, name, eos_token, files)


def _find_eos(library: Library, name: str, eos_token: str) -> int:
    for candidate in (eos_token,) if eos_token else EOS_NAMES:
        if (token := library.token_to_id(candidate)) is not None:
            return token
    names = [str(t.content) for t in library.get_added_tokens_decoder().values() if t.special]
    specials = f"its special tokens: {', '.join(names[:20]) or 'none'}"
    if eos_token:
        raise DataUsageError(f"eos_token={eos_token!r} is not in the vocabulary of {name}; {specials}")
    raise DataUsageError(
        f"tokenizer {name} has none of the usual end-of-document tokens ({', '.join(EOS_NAMES)}): "
        f"name it with --data.eos_token; {specials}"
    )
