"""Train a byte-level BPE tokenizer on the training split of a text source."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tercet.atomic_io import check_writable
from tercet.config.data import DataConfig
from tercet.data.records import pieces
from tercet.data.sources import record_source, validation_split
from tercet.data.stream import BadRecordError, DataError, DataUsageError
from tercet.data.tokenizers import LibraryTokenizer

EOS = "<|endoftext|>"
MIN_VOCAB = 256 + 1  # all bytes and EOS


def train_bpe(
    data: DataConfig, out: Path, *, vocab_size: int, max_bytes: int = 1 << 30, seed: int = 0, force: bool = False
) -> LibraryTokenizer:
    """Write a tokenizer.json with `vocab_size` tokens, including EOS (`<|endoftext|>`, token 0) and all 256 bytes.

    Reads at most `max_bytes` of text, in an order given by `seed`, without validation documents. Overwrites an
    existing file, which models may depend on, only with `force`.
    """
    if out.exists() and not force:
        raise DataUsageError(f"out={out} exists: choose another file, or overwrite it with --force")
    if data.source in ("synthetic", "shards", "mixture"):
        raise DataUsageError(
            f"source={data.source} has no text to train a tokenizer on: "
            "use python-source, text, jsonl, parquet or fineweb-edu"
        )
    if vocab_size < MIN_VOCAB:
        raise DataUsageError(f"vocab_size={vocab_size} is below {MIN_VOCAB}: it must cover all 256 bytes and EOS")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise DataError("training needs the tokenizers library: pip install 'tercet[data]'") from error
    check_writable("--out", out)
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    library.train_from_iterator(_texts(data, max_bytes, seed), trainer)
    if library.get_vocab_size() < vocab_size:
        raise DataUsageError(
            f"vocab_size={vocab_size} is too large for this text, which gives {library.get_vocab_size()} tokens: "
            "ask for that many, or give more text"
        )
    tokenizer = LibraryTokenizer(library, str(out), EOS)
    try:
        tokenizer.save(out)
    except OSError as error:
        raise DataError(f"out={out} cannot be written ({error}): choose another file") from error
    return tokenizer


def _texts(data: DataConfig, max_bytes: int, seed: int) -> Iterator[str]:
    source, size = record_source(data, seed=seed, shuffle=True), 0
    bad, first = 0, ""
    split = validation_split(source, data.validation_fraction)
    for record in source.open(0, None):
        if isinstance(record, BadRecordError):
            if data.bad_records == "error":
                raise record
            bad, first = bad + 1, first or record.summary
            continue
        if record.text and (part := split.part(record, "train")) is not None:
            size += len(part.text)
            for piece in pieces(part.text, 1 << 20):  # the library takes about 100 times their memory
                yield piece.decode()
            if size >= max_bytes:
                return
    if bad and not size:
        raise DataUsageError(f"no text is left to train a tokenizer on: {bad:,} bad records, the first: {first}")
