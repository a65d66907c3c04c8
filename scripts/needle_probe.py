"""Where is the answer to a needle question read, and do the layers that read it choose the needle's block?

    python scripts/needle_probe.py RUN --lengths 8192 32768 --questions 40 --out FILE.json

One forward pass over each question of `niah_single_2` (tercet eval ruler) and its answer. Queries are the last token of
the question and the first four of the answer. For every layer and KV head:

mass     attention that the queries would put on the needle's block if they read every block: the most of any head
rank     where that puts the block among the free ones, by the mean over the heads; 1 is first (median)
chosen   share of the queries whose selection has the block, also by whether the question was answered correctly

Works with every selector: it compares the blocks that the model selected with its own queries and keys.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.selector import block_lse
from tercet.inference.load import LanguageModel, load_model
from tercet.inference.ruler import Question, QuestionWriter
from tercet.model import block_sparse, nsa

TASK = "niah_single_2"
DEPTHS = 10
ANSWER_TOKENS = 4


class Attended(NamedTuple):
    """What one layer computed for one sequence."""

    q: Tensor  # [T, H, Dk]
    k: Tensor  # [T, G, Dk], of the selected branch
    block_indices: Tensor  # [T, G, n]


@contextmanager
def attention_calls() -> Iterator[list[Attended]]:
    """Collects what the layers with selected blocks compute, in their order."""
    calls: list[Attended] = []
    run_nsa, run_block_sparse = nsa.run_nsa, block_sparse.run_block_sparse

    def keep(q: Tensor, k: Tensor, block_indices: Tensor | None) -> None:
        if block_indices is None:
            raise SystemExit("every query reads every block at this length: give longer --lengths")
        calls.append(Attended(q[0], k[0], block_indices[0]))

    def kept_nsa(inputs: Any, **options: Any) -> Any:
        found = run_nsa(inputs, **options)
        keep(inputs.q, inputs.k_selected, found[1])
        return found

    def kept_block_sparse(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        found = run_block_sparse(q, k, v, **options)
        keep(q, k, found[1])
        return found

    nsa.run_nsa, block_sparse.run_block_sparse = kept_nsa, kept_block_sparse  # type: ignore[assignment]
    try:
        yield calls
    finally:
        nsa.run_nsa, block_sparse.run_block_sparse = run_nsa, run_block_sparse


def needle_blocks(model: LanguageModel, question: Question, block: int) -> list[int]:
    """Blocks with a token of the value, where it first occurs in the text."""
    (first, last), *_ = question.answers
    tokens = question.tokens.tolist()
    value = model.tokenizer.decode(tokens[first:last]).strip()
    pieces = [model.tokenizer.decode([token]) for token in tokens[:first]]
    at = "".join(pieces).find(value)
    if at < 0:
        raise ValueError(f"the answer {value!r} is not in the text")
    found, end = set(), 0
    for row, piece in enumerate(pieces):
        begin, end = end, end + len(piece)
        if begin < at + len(value) and end > at:
            found.add(row // block)
    return sorted(found)


def measure(attended: Attended, rows: Tensor, needle: list[int], config: NSAConfig) -> list[dict[str, list[Any]]]:
    """For each KV head: mass, rank (None if the block is forced) and chosen of every query."""
    length = attended.q.shape[0]
    blocks = config.num_blocks(length)
    lse = block_lse(attended.q[rows], attended.k, rows, rows, blocks, config.select_block)
    mass = lse.softmax(-1).cpu()  # [S, G, h, NB]
    mean = mass.mean(2)
    j = torch.arange(blocks)
    found = []
    for group in range(attended.k.shape[1]):
        cell: dict[str, list[Any]] = {"mass": mass[:, group][..., needle].sum(-1).amax(-1).tolist()}
        selected = attended.block_indices[rows, group].tolist()
        cell["chosen"] = [not set(needle).isdisjoint(blocks_read) for blocks_read in selected]
        cell["rank"] = []
        for query, row in enumerate(rows.tolist()):
            free = (j >= config.select_initial) & (j <= row // config.select_block - config.select_local)
            own = [mean[query, group, n] for n in needle if free[n]]
            above = int((free & (mean[query, group] > max(own))).sum()) if own else 0
            cell["rank"].append(1 + above if own else None)
        found.append(cell)
    return found


@torch.no_grad()
def probe(model: LanguageModel, writer: QuestionWriter, length: int, questions: int) -> dict[str, Any]:
    """Means over the questions of one length, for every layer and KV head."""
    layers = [(i, x) for i, x in enumerate(model.attention_layers()) if x.kind == "nsa"]
    asked: list[tuple[bool, list[list[dict[str, list[Any]]]]]] = []
    for number in range(questions):
        question = writer.question(TASK, length, number, number % DEPTHS / (DEPTHS - 1))
        first, last = question.answers[0]
        tokens = torch.full((1, length), model.tokenizer.eos_id)
        tokens[0, : len(question.tokens)] = torch.from_numpy(question.tokens.astype("int64"))
        with attention_calls() as calls:
            hidden = model.hidden(tokens.to(model.device))
        guesses = model.logits(hidden[0, first - 1 : last - 1]).argmax(-1).cpu()
        rows = torch.arange(first - 1, min(first + ANSWER_TOKENS, last), device=model.device)
        measured = []
        for (_, layer), attended in zip(layers, calls, strict=True):
            needle = needle_blocks(model, question, layer.config.select_block)
            measured.append(measure(attended, rows, needle, layer.config))
        asked.append((bool((guesses == tokens[0, first:last]).all()), measured))
    cells = [
        {"layer": i, "kv_head": group} | summary([(right, found[at][group]) for right, found in asked])
        for at, (i, _) in enumerate(layers)
        for group in range(model.config.kv_heads)
    ]
    return {"length": length, "questions": questions, "right": sum(right for right, _ in asked), "cells": cells}


def summary(asked: list[tuple[bool, dict[str, list[Any]]]]) -> dict[str, float | None]:
    """Of one layer and KV head. asked: for each question, whether it was answered correctly, and its queries."""

    def mean(key: str, among: tuple[bool, ...] = (True, False)) -> float | None:
        values = [value for right, cell in asked if right in among for value in cell[key]]
        return round(statistics.fmean(values), 4) if values else None

    ranks = [rank for _, cell in asked for rank in cell["rank"] if rank is not None]
    return {
        "mass": mean("mass"),
        "rank": statistics.median(ranks) if ranks else None,
        "chosen": mean("chosen"),
        "chosen_if_right": mean("chosen", (True,)),
        "chosen_if_wrong": mean("chosen", (False,)),
    }


def show(found: dict[str, Any]) -> None:
    """The layers that look at the needle most."""
    print(f"{found['length']:,} tokens: {found['right']} of {found['questions']} answered correctly")
    print("layer  KV head    mass  rank  chosen  if right  if wrong")
    for cell in sorted(found["cells"], key=lambda cell: -cell["mass"])[:6]:
        shares = (cell[key] for key in ("chosen", "chosen_if_right", "chosen_if_wrong"))
        chosen, right, wrong = ("-" if share is None else f"{share:.0%}" for share in shares)
        rank = "-" if cell["rank"] is None else f"{cell['rank']:g}"
        print(f"{cell['layer']:>5}  {cell['kv_head']:>7}  {cell['mass']:>6.3f}  {rank:>4}", end="")
        print(f"  {chosen:>6}  {right:>8}  {wrong:>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--wording", choices=("training", "held-out"), default="training")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = load_model(args.run, device="auto", dtype="auto")
    writer = QuestionWriter(model, args.wording, max(args.lengths), seed=0)
    found = []
    for length in args.lengths:
        found.append(probe(model, writer, length, args.questions))
        show(found[-1])
    record = {"run": str(args.run), "step": model.step, "wording": args.wording, "found": found}
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
