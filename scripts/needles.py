"""Does a model that becomes block-sparse without training lose facts? Facts found, and loss, of each choice of blocks.

    python scripts/needles.py FOLDER [--gguf FILE] [--lengths 2048,4096,8000] [--questions 80] [--tasks single,…]
                              [--exact-groups stored|calibrate|FILE] [--json FILE]

FOLDER holds a Llama-like model of transformers (with --gguf: that file). The haystack is Python's documentation. The
tasks are RULER's, worded anew: a fact (single), one of four (multi-key), all four values of a key (multi-value), and
all names of a value that was copied three times (tracking). An answer is found if all of its tokens are the most likely
ones after the correct text before them. The loss is that of 1,000 tokens before the question of a single fact.

--exact-groups adds choices in which some KV heads choose by exact scores and the others by block means: the setting in
FOLDER's config.json (`tercet calibrate --store`), that of a JSON file (such an entry, or a list per layer), or what
calibration recommends now, beside a third and a sixth of the groups. On a GPU the kernels are checked first, and at the
end the time to the first token is compared with sdpa.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tercet import NSAConfig
from tercet.bench.attention import OWN
from tercet.doctor.kernels import compare
from tercet.inference.calibrate import fact_table, load_dense, python_documentation
from tercet.interop.huggingface import use_block_sparse
from tercet.interop.huggingface.support import NAME
from tercet.model.config import ModelConfig

PLACES = ("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Quebec", "Nairobi", "Dublin", "Hanoi", "Tunis", "Bergen",
          "Porto", "Vienna", "Accra", "Osaka", "Minsk", "Havana", "Riga", "Perth", "Sofia")  # fmt: skip
WORDINGS = (  # a fact, a question, and the beginning of its answer
    ("The secret code for the office in {p} is {n}.", "What is the secret code for the office in {p}?",
     "The secret code for the office in {p} is"),
    ("Remember that the locker of the {p} team opens with {n}.", "Which number opens the locker of the {p} team?",
     "The locker of the {p} team opens with"),
    ("In {p}, the registration number of the old ship was {n}.",
     "What was the registration number of the old ship in {p}?",
     "In {p}, the registration number of the old ship was"),
    ("The archive in {p} keeps the map on shelf {n}.", "On which shelf does the archive in {p} keep the map?",
     "The archive in {p} keeps the map on shelf"),
)  # fmt: skip
SEVERAL = (  # a fact, and the question for all values of {p}
    ("One of the tickets sold in {p} has the number {n}.", "Which numbers do the tickets sold in {p} have?",
     "The tickets sold in {p} have the numbers"),
    ("A train to {p} leaves from gate {n}.", "From which gates do the trains to {p} leave?",
     "The trains to {p} leave from the gates"),
)  # fmt: skip
CHAINS = (  # a value, a copy, and the question for all names
    ("The name {a} stands for {n}.", "The name {b} stands for the same as {a}.", "Which names stand for {n}?",
     "The names that stand for {n} are"),
    ("Variable {a} was set to {n}.", "Variable {b} was set to the value of {a}.", "Which variables have the value {n}?",
     "The variables with the value {n} are"),
)  # fmt: skip
TASKS = ("single", "multi-key", "multi-value", "tracking")
MANY = 4  # facts of the others
Choice = dict[str, Any] | None  # the entry `tercet` of a config.json; None: dense


class Case(NamedTuple):
    tokens: list[int]
    answers: list[range]  # where they are


def make_case(encode: Any, haystack: list[int], task: str, length: int, i: int, chance: random.Random) -> Case:
    numbers = [("".join(str(chance.randint(1, 9)) for _ in range(5))) for _ in range(MANY)]
    places = [PLACES[(i + 7 * n) % len(PLACES)] for n in range(MANY)]
    depths = sorted(0.05 + 0.9 * chance.random() for _ in range(MANY))
    if task == "tracking":
        value, copy, question, begin = (text.replace("{n}", numbers[0]) for text in CHAINS[i % len(CHAINS)])
        answers = ["".join(chance.choices("BCDFGHJKLMNPQRSTVWXZ", k=3)) for _ in range(MANY)]
        facts = [value.format(a=answers[0])]
        facts += [copy.format(a=a, b=b) for a, b in pairwise(answers)]
    else:
        wordings = SEVERAL if task == "multi-value" else WORDINGS
        fact, question, begin = wordings[i % len(wordings)]
        keys = [places[0]] * MANY if task == "multi-value" else places
        facts, asked = [fact.format(p=p, n=n) for p, n in zip(keys, numbers, strict=True)], i % MANY
        answers = numbers
        if task == "single":
            facts, asked, depths = facts[:1], 0, [0.05 + 0.9 * (i // len(WORDINGS) % 5) / 4]
        if task != "multi-value":
            answers = [numbers[asked]]
        question, begin = (text.format(p=keys[asked]) for text in (question, begin))
    end, bounds = f"\nQuestion: {question}\nAnswer: {begin}", []
    for number, answer in enumerate(answers):
        first = len(encode(end + ("," if number else "")))
        end += f"{',' if number else ''} {answer}"
        bounds.append((first, len(encode(end))))
    ask, needles = encode(end), [encode(f" {fact} ") for fact in facts]
    room = length - len(ask) - sum(map(len, needles))
    start = chance.randint(0, len(haystack) - room)
    text, tokens, at = haystack[start : start + room], [], 0
    for depth, needle in zip(depths, needles, strict=True):
        tokens += text[at : int(room * depth)] + needle
        at = int(room * depth)
    tokens += text[at:]
    return Case(tokens + ask, [range(len(tokens) + a, len(tokens) + b) for a, b in bounds])


def make_cases(tokenizer: Any, task: str, length: int, questions: int) -> list[Case]:
    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    haystack = encode(python_documentation())
    chance = random.Random(f"{task} {length}")
    return [make_case(encode, haystack, task, length, i, chance) for i in range(questions)]


@torch.no_grad()
def score(model: Any, cases: list[Case]) -> tuple[float, float]:
    """Facts found, of several asked together a part each, and the mean loss."""
    found, loss = 0.0, 0.0
    for tokens, answers in cases:
        ids = torch.tensor([tokens], device=model.device)
        hidden = model.model(ids, use_cache=False)[0][0]
        for answer in answers:
            best = model.lm_head(hidden[answer.start - 1 : answer.stop - 1]).argmax(-1)
            found += torch.equal(best, ids[0, answer.start : answer.stop]) / len(answers)
        part = slice(max(0, len(tokens) - 1100), len(tokens) - 100)
        logits = model.lm_head(hidden[part]).float()
        loss += float(torch.nn.functional.cross_entropy(logits, ids[0, part.start + 1 : part.stop + 1]))
    return found, loss / len(cases)


def entry(model: Any, *sizes: int, **options: Any) -> Choice:
    use_block_sparse(model, NSAConfig(16, 16, *sizes), **options)
    return model.config.tercet


def choices(model: Any, tokenizer: Any, folder: Path, exact: str | None, longest: int) -> Iterator[tuple[str, Choice]]:
    yield "dense", None
    yield "own, 16 of 64", entry(model, 64, 16, 1, 2)
    yield "own, 8 of 128", entry(model, 128, 8, 1, 1)
    yield "means of keys, 16 of 64", entry(model, 64, 16, 1, 2, scorer="compressed")
    if exact == "calibrate":
        model.set_attn_implementation("sdpa")
        table = fact_table(model, tokenizer, length=min(longest, model.config.max_position_embeddings))
        print(f"{table}\n", flush=True)
        for part, name in ((1 / 3, "a third"), (1 / 6, "a sixth")):
            exact_groups = table.exact_groups(part)
            yield f"own for {name} of groups, 16 of 64", entry(model, 64, 16, 1, 2, exact_groups=exact_groups)
        best = table.recommended
        yield f"recommended: {best.blocks}, {best.scorer}", table.stored(best)
    elif exact is not None:
        file = folder / "config.json" if exact == "stored" else Path(exact)
        stored = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(stored, list):
            stored = entry(model, 64, 16, 1, 2, exact_groups=stored)
        stored = stored.get("tercet", stored)
        if "nsa" not in stored:
            raise SystemExit(f"{file} has no entry `tercet`: run `tercet calibrate {folder} --store`")
        shown = f"{stored['nsa']['select_count']} of {stored['nsa']['select_block']}"
        yield f"{'stored' if exact == 'stored' else file.name}: {shown}", stored


def use(model: Any, choice: Choice) -> None:
    if choice is not None:
        model.config.tercet = choice
    model.set_attn_implementation("sdpa" if choice is None else NAME)


def check_kernels(model: Any) -> None:
    """What the kernels choose and compute, against the reference, on random inputs of the model's sizes."""
    config = model.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = ModelConfig(heads=heads, kv_heads=groups, head_dim=size, nsa=NSAConfig(16, 16, 64, 16), **OWN)
    forward, backward, same = compare(sizes, model.dtype, device="cuda", length=4096, packed=False)
    print(f"kernels against the reference: errors {forward:.4f}, {backward:.4f}, {same:.2%} of the blocks equal")
    if not (max(forward, backward) < 0.02 and same > 0.98):
        raise SystemExit("the kernels differ from the reference: no facts are counted with them")


@torch.no_grad()
def first_token(model: Any, prompt: list[int], repeats: int = 15) -> float:
    """Milliseconds from a prompt to its first token, cache included; the median."""
    ids, times = torch.tensor([prompt], device=model.device), []
    for i in range(repeats + 3):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:  # compiled and warm
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", help="a GGUF file in the folder")
    parser.add_argument("--lengths", default="2048,4096,8000")
    parser.add_argument("--questions", type=int, default=80)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--exact-groups")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    given = parser.parse_args()
    lengths, tasks = [int(n) for n in given.lengths.split(",")], given.tasks.split(",")
    model, tokenizer = load_dense(given.folder / given.gguf if given.gguf else given.folder)
    if model.device.type == "cuda":
        check_kernels(model)
    compared = list(choices(model, tokenizer, given.folder, given.exact_groups, max(lengths)))
    print(f"| length | choice | {' | '.join(tasks)} | loss |\n|{'---|' * (len(tasks) + 3)}", flush=True)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        cases = [make_cases(tokenizer, task, length, given.questions) for task in tasks]
        for name, choice in compared:
            use(model, choice)
            scores = [score(model, part) for part in cases]
            found = " | ".join(f"{facts:g} of {given.questions}" for facts, _ in scores)
            print(f"| {length} | {name} | {found} | {scores[0][1]:.4f} |", flush=True)
            parts = {task: facts for task, (facts, _) in zip(tasks, scores, strict=True)}
            rows.append({"length": length, "choice": name, **parts, "loss": round(scores[0][1], 4)})
    if given.json:
        given.json.write_text(json.dumps({"questions": given.questions, "results": rows}, indent=1), encoding="utf-8")
    if model.device.type == "cuda":
        print("\n| first token at 8,192 | ms | × sdpa |\n|---|---|---|")
        dense, prompt = 0.0, tokenizer(python_documentation(), add_special_tokens=False)["input_ids"][:8192]
        for name, choice in compared:
            use(model, choice)
            ms = first_token(model, prompt)
            dense = dense or ms
            print(f"| {name} | {ms:.1f} | {dense / ms:.2f} |", flush=True)


if __name__ == "__main__":
    main()
