"""Tercet's tokenizers as transformers' own: the same text gives the same tokens."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from tercet.data.tokenizers import ByteTokenizer, LibraryTokenizer, Tokenizer
from tercet.errors import TercetError

BYTE_EOS = "<|endoftext|>"


def as_transformers(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """A tokenizer that `save_pretrained` writes and AutoTokenizer reads, with EOS for padding too."""
    from tokenizers import Tokenizer as Library

    library: Any
    end: str | None
    if isinstance(tokenizer, ByteTokenizer):
        library, end = _bytes(), BYTE_EOS
    elif isinstance(tokenizer, LibraryTokenizer):
        library = Library.from_str(tokenizer.to_str())
        end = library.id_to_token(tokenizer.eos_id)
    else:
        raise TercetError(
            f"tokenizer {tokenizer.name} has no form that transformers reads: use byte or a tokenizer.json"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=library,
        eos_token=end,
        pad_token=end,
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        # "<|endoftext|>" within a text is text here, as it was in training
        split_special_tokens=True,
    )


def _bytes() -> object:
    """256 tokens, each the byte of its number, but for 0, which no text holds and which is EOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = _byte_letters()
    vocabulary = {letter: byte for byte, letter in letters.items() if byte != 0} | {BYTE_EOS: 0}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(BYTE_EOS, special=True, normalized=False)])
    return library


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in byte-level vocabularies: itself if it is printable Latin-1, else one
    from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
