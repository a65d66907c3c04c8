"""Convert Tercet's tokenizers to transformers tokenizers that produce the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tercet.data.tokenizers import GENERATION, SOURCE_CONFIG, ByteTokenizer, LibraryTokenizer, Tokenizer
from tercet.errors import TercetError
from tercet.parse import describe, parse_json

BYTE_EOS = "<|endoftext|>"


def save_tokenizer(tokenizer: Tokenizer, context: int, folder: Path) -> None:
    """Write what AutoTokenizer reads: the files that the tokenizer came with, unchanged; else new ones."""
    if isinstance(tokenizer, LibraryTokenizer) and "tokenizer_config.json" in tokenizer.files:
        for name, text in tokenizer.files.items():
            if name not in (GENERATION, SOURCE_CONFIG):  # these are the model's
                (folder / name).write_bytes(text.encode())
        return
    as_transformers_tokenizer(tokenizer, context).save_pretrained(folder)


def saved_settings(tokenizer: Tokenizer, name: str) -> dict[str, Any] | None:
    """A JSON file that came with the tokenizer; None: there is none."""
    text = tokenizer.files.get(name) if isinstance(tokenizer, LibraryTokenizer) else None
    try:
        settings: dict[str, Any] | None = None if text is None else dict(parse_json(text))
    except (TypeError, ValueError) as error:
        raise TercetError(
            f"{name} next to {tokenizer.name} is damaged ({describe(error)}): copy it again, or delete it"
        ) from None
    return settings


def special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """BOS, EOS and padding for config.json: those of the model that the tokenizer came with, if there is one."""
    source = saved_settings(tokenizer, SOURCE_CONFIG)
    if source is None:
        return {"bos_token_id": None, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.eos_id}
    return {name: source.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def generation_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """The generation_config.json that the tokenizer came with; generation also stops at the EOS of the training."""
    settings = saved_settings(tokenizer, GENERATION) or special_ids(tokenizer)
    ends = settings.get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return settings if tokenizer.eos_id in ends else settings | {"eos_token_id": [*ends, tokenizer.eos_id]}


def as_transformers_tokenizer(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """A tokenizer for `save_pretrained` and AutoTokenizer. EOS is also the padding token."""
    from tokenizers import Tokenizer as Library

    library: Any
    end: str | None
    if isinstance(tokenizer, ByteTokenizer):
        library, end = _byte_tokenizer(), BYTE_EOS
    elif isinstance(tokenizer, LibraryTokenizer):
        library = Library.from_str(tokenizer.files["tokenizer.json"])
        library.post_processor = None  # it may add BOS or EOS to a text, which training does not
        end = library.id_to_token(tokenizer.eos_id)
    else:
        raise TercetError(
            f"tokenizer {tokenizer.name} cannot be converted for transformers: use byte or a tokenizer.json"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=library,
        eos_token=end,
        pad_token=end,
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        # bytes have no special tokens: <|endoftext|> is 13 of them
        split_special_tokens=isinstance(tokenizer, ByteTokenizer),
    )


def _byte_tokenizer() -> object:
    """256 tokens, one per byte; byte 0 never occurs in text and is EOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    table = _byte_table()
    vocabulary = {char: byte for byte, char in table.items() if byte != 0} | {BYTE_EOS: 0}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(BYTE_EOS, special=True, normalized=False)])
    return library


def _byte_table() -> dict[int, str]:
    """GPT-2's byte-to-unicode table: printable Latin-1 maps to itself, other bytes to U+0100 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in table]
    return table | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
