"""Near-copies between documents: measure them in prepared shards, or remove them from a corpus.

python scripts/near_copies.py measure SHARDS            # how much of the held-out text occurs in training text
python scripts/near_copies.py remove IN.jsonl OUT.jsonl   # keep one of several similar documents

A document is compared by its shingles: 8 consecutive words, one in eight of them by hash. It is a near-copy of other
text if that contains at least half of them. `remove` also drops held-out documents of which training text contains a
fifth. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tercet.data.order import document_hash, in_validation, permutation, validation_threshold
from tercet.data.shards import read_manifest
from tercet.data.tokenizers import load_tokenizer

WORDS = 8  # per shingle
SAMPLED = 8  # one shingle in this many
NEAR_COPY = 0.5
HELD_OUT = 0.2
SHORTEST = 8  # a document with fewer sampled shingles is not judged


def shingles(text: str) -> np.ndarray:
    """Hashes of the sampled shingles of a text, sorted, each once. uint64"""
    words = np.array([zlib.crc32(word.encode()) for word in re.findall(r"\w+", text.lower())], np.uint64)
    count = len(words) - WORDS + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    for i in range(WORDS):
        hashes = (hashes + words[i : i + count]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes[hashes % np.uint64(SAMPLED) == 0])


def covered(own: np.ndarray, others: np.ndarray) -> float:
    """Share of the shingles that the sorted `others` contain."""
    if len(own) == 0 or len(others) == 0:
        return 0.0
    place = np.minimum(np.searchsorted(others, own), len(others) - 1)
    return float((others[place] == own).mean())


def union(parts: list[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)


def compare(validation: list[np.ndarray], training: np.ndarray, sizes: list[int]) -> dict[str, Any]:
    """How much of the validation documents (their shingles; their sizes) occurs in training text."""
    shares = np.array([covered(own, training) for own in validation])
    weights = np.array([len(own) for own in validation])
    near = (shares >= NEAR_COPY) & (weights >= SHORTEST)
    return {
        "held_out_documents": len(validation),
        "near_copies": int(near.sum()),
        "share_of_held_out_text_in_near_copies": round(float(np.array(sizes)[near].sum() / sum(sizes)), 4),
        "share_of_held_out_shingles_in_training": round(float((shares * weights).sum() / weights.sum()), 4),
    }


def documents_of(shards: Path) -> Iterator[tuple[str, int]]:
    """(text, hash) of every document of prepared shards."""
    manifest = read_manifest(shards)
    name = "byte" if manifest["tokenizer"]["name"] == "byte" else str(shards / "tokenizer.json")
    tokenizer = load_tokenizer(name)
    for entry in manifest["shards"]:
        tokens = np.load(shards / f"{entry['name']}.tokens.npy", mmap_mode="r")
        documents, first = np.load(shards / f"{entry['name']}.documents.npy"), 0
        for end, digest in zip(documents["end"].tolist(), documents["hash"].tolist(), strict=True):
            yield tokenizer.decode(tokens[first : end - 1].tolist()), digest  # without the end of the document
            first = end


def measure(shards: Path, fraction: float) -> dict[str, Any]:
    training: list[np.ndarray] = []
    validation: list[np.ndarray] = []
    sizes: list[int] = []
    for text, digest in documents_of(shards):
        if in_validation(np.array([digest], np.uint64), fraction)[0]:
            validation.append(shingles(text))
            sizes.append(len(text))
        else:
            training.append(shingles(text))
    return {"documents": len(training) + len(validation)} | compare(validation, union(training), sizes)


def remove(source: Path, target: Path, fraction: float) -> dict[str, Any]:
    with source.open(encoding="utf-8") as stream:
        texts = [json.loads(line)["text"] for line in stream]
    seen: set[int] = set()
    kept: list[tuple[str, np.ndarray]] = []
    for i in permutation(len(texts), 0).tolist():  # of similar documents, any may stay
        own = shingles(texts[i])
        found = own.tolist()
        if len(found) < SHORTEST or sum(map(seen.__contains__, found)) < NEAR_COPY * len(found):
            seen.update(found)
            kept.append((texts[i], own))
    threshold = validation_threshold(fraction)
    held_out = [document_hash(text.encode()) < threshold for text, _ in kept]
    training = union([own for (_, own), out in zip(kept, held_out, strict=True) if not out])
    clean = [
        each
        for each, out in zip(kept, held_out, strict=True)
        if not out or (len(each[1]) >= SHORTEST and covered(each[1], training) < HELD_OUT)
    ]
    with target.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text, _ in clean)
    left = [(own, len(text)) for text, own in clean if document_hash(text.encode()) < threshold]

    def size(these: list[tuple[str, np.ndarray]]) -> int:
        return sum(len(text) for text, _ in these)

    total = sum(map(len, texts))
    return {
        "documents": len(texts),
        "characters": total,
        "removed_documents": len(texts) - len(kept),
        "removed_share_of_text": round(1 - size(kept) / total, 4),
        "removed_held_out_documents": len(kept) - len(clean),
        "kept_documents": len(clean),
        "kept_characters": size(clean),
    } | compare([own for own, _ in left], training, [length for _, length in left])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("measure", help="prepared shards")
    measured.add_argument("shards", type=Path)
    removed = commands.add_parser("remove", help="JSON lines with a field `text`")
    removed.add_argument("source", type=Path)
    removed.add_argument("target", type=Path)
    for command in (measured, removed):
        command.add_argument("--fraction", type=float, default=0.02, help="data.validation_fraction")
    args = parser.parse_args()
    if args.command == "measure":
        result = measure(args.shards, args.fraction)
    else:
        result = remove(args.source, args.target, args.fraction)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
