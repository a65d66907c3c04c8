"""Does a model that becomes block-sparse without training lose facts? Needles and loss of each choice of blocks.

    python scripts/needles.py FOLDER [--gguf FILE] [--lengths 2048,4096,8000] [--questions 80]

FOLDER holds a Llama-like model of transformers (with --gguf: that file). The haystack is Python's own documentation; a
fact is found if all tokens of its answer are the most likely ones. The loss is that of 1,000 tokens before the end.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tercet import NSAConfig
from tercet.interop.huggingface import use_block_sparse

PLACES = [
    "Lisbon",
    "Oslo",
    "Cairo",
    "Lima",
    "Kyoto",
    "Quebec",
    "Nairobi",
    "Dublin",
    "Hanoi",
    "Tunis",
    "Bergen",
    "Porto",
    "Vienna",
    "Accra",
    "Osaka",
    "Minsk",
    "Havana",
    "Riga",
    "Perth",
    "Sofia",
]
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
CHOICES = (  # name, blocks per query, tokens in a block, scorer
    ("dense", 0, 0, ""), ("own, 16 of 64", 16, 64, "own"), ("own, 8 of 128", 8, 128, "own"),
    ("means of keys, 16 of 64", 16, 64, "compressed"),
)  # fmt: skip

Case = tuple[list[int], list[int]]  # prompt, answer


def make_cases(tokenizer, length: int, questions: int) -> list[Case]:
    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    haystack = encode(" ".join(" ".join(text.split()) for text in pydoc_data.topics.topics.values()))
    chance, cases = random.Random(length), []
    for i in range(questions):
        number, place = "".join(str(chance.randint(1, 9)) for _ in range(5)), PLACES[i % len(PLACES)]
        fact, question, begin = (part.format(p=place, n=number) for part in WORDINGS[i % len(WORDINGS)])
        needle, ask = encode(f" {fact} "), encode(f"\nQuestion: {question}\nAnswer: {begin}")
        answer = encode(f" {number}")
        room = length - len(needle) - len(ask) - len(answer)
        start = chance.randint(0, len(haystack) - room)
        text = haystack[start : start + room]
        at = int(room * (0.05 + 0.9 * (i // len(WORDINGS) % 5) / 4))
        cases.append((text[:at] + needle + text[at:] + ask, answer))
    return cases


@torch.no_grad()
def score(model, cases: list[Case]) -> tuple[int, float]:
    """Facts found, and the mean loss."""
    hits, loss = 0, 0.0
    for prompt, answer in cases:
        tokens = torch.tensor([prompt + answer], device=model.device)
        hidden = model.model(tokens, use_cache=False)[0][0]
        found = model.lm_head(hidden[len(prompt) - 1 : -1]).argmax(-1)
        hits += found.tolist() == answer
        loss += float(
            torch.nn.functional.cross_entropy(model.lm_head(hidden[-1100:-101]).float(), tokens[0, -1099:-100])
        )
    return hits, loss / len(cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--gguf", help="a GGUF file in the folder")
    parser.add_argument("--lengths", default="2048,4096,8000")
    parser.add_argument("--questions", type=int, default=80)
    given = parser.parse_args()
    source = {"gguf_file": given.gguf} if given.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(given.folder, **source)
    loaded = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32, **source)
    if given.gguf:  # transformers keeps it packed
        del loaded.config.quantization_config
        weights = {name: tensor.float() for name, tensor in loaded.state_dict().items()}
        loaded = type(loaded)(loaded.config)
        loaded.load_state_dict(weights)
    gpu = torch.cuda.is_available()
    model = loaded.eval().to("cuda" if gpu else "cpu", torch.bfloat16 if gpu else torch.float32)
    print("| length | choice | facts | loss |\n|---|---|---|---|", flush=True)
    for length in map(int, given.lengths.split(",")):
        cases = make_cases(tokenizer, length, given.questions)
        for name, count, block, scorer in CHOICES:
            if count:
                local = 2 if block == 64 else 1
                use_block_sparse(model, NSAConfig(16, 16, block, count, 1, local), scorer=scorer)
            else:
                model.set_attn_implementation("sdpa")
            hits, loss = score(model, cases)
            print(f"| {length} | {name} | {hits} of {len(cases)} | {loss:.4f} |", flush=True)


if __name__ == "__main__":
    main()
