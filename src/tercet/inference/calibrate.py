"""`tercet calibrate`: which blocks, how many of them and which scorer keep what a dense model's attention looks for.

Facts are planted in text and asked for at its end. The dense model reads each document once; its attention on sampled
queries is then compared with what each setting would have read:

fact   of the attention that the queries of the answer pay to the fact's tokens: the part in the chosen blocks, over all
       layers and heads, in documents that the model answers. This part goes with the facts that a sparse model finds
mass   of all attention at ordinary places: the part in the chosen blocks; `free` counts blocks that are chosen only
"""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

from tercet.atomic_io import write_json
from tercet.attention.config import NSAConfig
from tercet.attention.selector import slow_channels, take_channels
from tercet.errors import UsageError
from tercet.train.device import pick_device

BLOCKS, TOKENS, CHANNELS = (32, 64, 128), (512, 1024, 2048), (16, 32, 64)
FORCED = (1, 2)  # blocks at the start, and most recent ones, that every query reads
SHARES = (1.0, 1 / 2, 1 / 3, 1 / 6, 0.0)  # of groups that choose by exact scores
ORDINARY = 32  # queries per document at which `mass` is measured
MEANS, ORACLE = "block means", "true attention"
# What the recommended setting may keep less than the default one, of facts and of all attention. Where 4 points of mass
# less kept the facts, the loss at 8k rose by 1.4% instead of 0.5% (docs/results/needles.json).
FACT_LOSS, MASS_LOSS = 0.01, 0.01
# The estimate of speed: multiply-adds per second of a causal forward pass on one H200 in bf16 with heads of 128. Dense
# attention and scattered blocks are measured (docs/performance.md, docs/lab-notes/selected-branch.md), the scores and
# the seconds that launches take are rounded guesses from them.
LENGTHS = (8192, 16384, 32768, 65536, 131072)
DENSE_RATE, SCORE_RATE, BLOCK_RATES, LAUNCHES = 300e12, 150e12, {32: 50e12, 64: 80e12, 128: 80e12}, 2e-4

_NAME = "tercet_calibrate"
_WORDINGS = (  # a fact, a question, and how its answer begins
    ("The safe of Mr {p} opens with the number {n}.", "Which number opens the safe of Mr {p}?",
     "The safe of Mr {p} opens with the number"),
    ("Please note that the invoice for {p} has the number {n}.", "Which number does the invoice for {p} have?",
     "The invoice for {p} has the number"),
    ("The telephone extension of Dr {p} is {n}.", "What is the telephone extension of Dr {p}?",
     "The telephone extension of Dr {p} is"),
    ("Last year the village of {p} counted {n} inhabitants.", "How many inhabitants did the village of {p} count?",
     "Last year the village of {p} counted"),
    ("Captain {p} wrote down the pass code {n}.", "Which pass code did Captain {p} write down?",
     "Captain {p} wrote down the pass code"),
    ("The parcel for Mrs {p} lies in box {n}.", "In which box does the parcel for Mrs {p} lie?",
     "The parcel for Mrs {p} lies in box"),
)  # fmt: skip
_PEOPLE = ("Arden", "Bellamy", "Corbin", "Dunmore", "Ellery", "Farrow", "Granger", "Holt", "Iverson", "Jessop",
           "Kendal", "Larkin", "Merrow", "Norris", "Osgood", "Pascoe", "Quimby", "Radley", "Selwyn")  # fmt: skip


class Document(NamedTuple):
    """A text with a planted fact that ends with a question and its answer."""

    tokens: list[int]
    fact: range
    answer: range


def load_dense(path: Path, device: str = "auto") -> tuple[Any, Any]:
    """A model of transformers and its tokenizer: a folder, or a GGUF file. bfloat16 on a GPU, else float32."""
    folder, gguf = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    on = pick_device(device, flag="--device")
    dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if gguf else dtype, **gguf)
    except Exception as error:  # of many kinds
        why = " ".join(str(error).split())[:300]
        raise UsageError(f"{path} cannot be loaded by transformers ({why}): give a folder of a causal model") from None
    if gguf:  # transformers keeps it packed
        vars(model.config).pop("quantization_config", None)
        unpacked = type(model)(model.config)
        unpacked.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
        model = unpacked
    return model.eval().to(on, dtype), tokenizer


def python_documentation() -> str:
    """Text to plant facts in that every Python brings along, as one line."""
    return " ".join(" ".join(pydoc_data.topics.topics.values()).split())


def plant_facts(tokenizer: Any, text: str | None = None, *, length: int = 4096, count: int = 16) -> list[Document]:
    """Documents of `length` tokens, each with one fact at another depth. text: default Python's own documentation."""

    def encode(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False)["input_ids"])

    haystack = encode(" ".join(text.split()) if text else python_documentation())
    whole = tokenizer("a")["input_ids"]
    begin = whole[: whole.index(encode("a")[0])]  # such as BOS
    draws, documents = random.Random(0), []
    for i in range(count):
        name, number = _PEOPLE[i % len(_PEOPLE)], "".join(str(draws.randint(1, 9)) for _ in range(5))
        fact, question, start = (part.format(p=name, n=number) for part in _WORDINGS[i % len(_WORDINGS)])
        needle, ask = encode(f" {fact} "), encode(f"\nQuestion: {question}\nAnswer: {start}")
        asked = encode(f"\nQuestion: {question}\nAnswer: {start} {number}")
        known = next((n for n, (a, b) in enumerate(zip(ask, asked, strict=False)) if a != b), len(ask))
        room = length - len(begin) - len(needle) - len(asked)
        if room < 256 or len(haystack) < room:
            why = f"--length {length} is too short" if room < 256 else f"the text has {len(haystack):,} tokens"
            raise UsageError(f"{why}: a document of {length:,} tokens needs {max(room, 256):,} of text around its fact")
        first = (len(haystack) - room) * i // max(1, count - 1)
        filler = haystack[first : first + room]
        at = int(room * (0.1 + 0.7 * (7 * i % count) / count))
        tokens, place = begin + filler[:at] + needle + filler[at:] + asked, len(begin) + at
        answer = range(length - len(asked) + known, length)
        documents.append(Document(tokens, range(place, place + len(needle)), answer))
    return documents


class Grid(NamedTuple):
    """Which settings are compared."""

    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    channels: tuple[int, ...]  # of q and k, that the scorer `own` reads; the last: all of them

    @property
    def scorers(self) -> tuple[str, ...]:
        return ORACLE, *(f"own, {c} channels" for c in self.channels), MEANS


@dataclass(frozen=True)
class Setting:
    """Blocks that each query reads, what chooses them, and the shares of attention that this keeps."""

    block: int
    tokens: int  # that a query reads: whole blocks, the first one and two local ones included
    scorer: str
    channels: int  # that exact scores read
    exact: float  # share of the groups that choose by exact scores; the others choose by block means
    fact: float
    mass: float
    free: float  # of the attention outside of the blocks that every query reads

    @property
    def blocks(self) -> str:
        return f"{self.tokens // self.block} of {self.block}"


class _Measured(NamedTuple):
    """Of one document, by layer and KV head: attention on the fact, on everything, and on forced blocks."""

    fact: Tensor  # kept, [layers, KV heads, block sizes, scorers, counts]
    mass: Tensor  # likewise
    fact_total: Tensor  # [layers, KV heads]
    mass_total: Tensor  # likewise
    forced: Tensor  # [layers, KV heads, block sizes]


class _Probe:
    """Takes the place of a model's attention: measures it for some queries, and computes it with sdpa."""

    def __init__(self, grid: Grid, document: Document, device: torch.device) -> None:
        self._grid, self._fact = grid, document.fact
        asked = torch.arange(document.answer.start - 1, document.answer.stop - 1)  # whose next tokens are the answer
        ordinary = torch.linspace(len(document.tokens) / 2, document.answer.start - 64, ORDINARY).long()
        self._asked, self._rows = len(asked), torch.cat((asked, ordinary)).to(device)
        self.layers: dict[int, _Measured] = {}

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        window, size = options.get("sliding_window"), query.shape[-1]
        if window is None or window >= key.shape[2]:
            scale = size**-0.5 if options.get("scaling") is None else options["scaling"]
            groups = zip(query[0].unflatten(0, (key.shape[1], -1)), key[0], strict=True)
            found = [self._group(q[:, self._rows].float(), k.float(), scale) for q, k in groups]
            self.layers[module.layer_idx] = _Measured(*map(torch.stack, zip(*found, strict=True)))
        return AttentionInterface()["sdpa"](module, query, key, value, mask, **options)

    def _group(self, q: Tensor, k: Tensor, scale: float) -> _Measured:
        """q [heads, queries, size] and k [tokens, size] of one KV head; the answer's queries first."""
        t, tokens, asked, fact = self._rows[:, None], len(k), self._asked, self._fact
        later = torch.arange(tokens, device=k.device) > t
        p = (q @ k.T * scale).masked_fill(later, -torch.inf).softmax(-1).sum(0)  # [queries, tokens]
        on_fact = F.pad(p[:asked, fact.start : fact.stop], (fact.start, tokens - fact.stop))
        products = []
        for channels in self._grid.channels:
            planes = slow_channels(q.shape[-1], channels // 2)
            a, b = (q, k) if planes is None else (take_channels(q, planes), take_channels(k, planes))
            products.append((a @ b.T).amax(0))
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        for block in self._grid.blocks:
            mass, mass_on_fact = (_split(x, block).sum(-1) for x in (p, on_fact))
            j, own = torch.arange(mass.shape[-1], device=k.device), t // block
            by_means = q @ (_split(k.T, block).sum(-1) / block) * scale
            by_means = by_means.masked_fill((j + 1) * block > t + 1, -torch.inf).softmax(-1).sum(0)
            scores = torch.stack([mass, *(_split(x, block, -torch.inf).amax(-1) for x in products), by_means])
            forced = (j < FORCED[0]) | ((j > own - FORCED[1]) & (j <= own))
            order = scores.masked_fill(j > own, -torch.inf).masked_fill(forced, torch.inf).argsort(-1, descending=True)
            last = [min(count // block, scores.shape[-1]) - 1 for count in self._grid.tokens]

            def read(x: Tensor, order: Tensor, last: list[int] = last) -> Tensor:
                """x [queries, blocks] summed over the queries and the blocks of each count -> [scorers, counts]"""
                return x.expand_as(order).gather(-1, order).cumsum(-1)[..., last].sum(1)

            everywhere, always = read(mass[asked:], order[:, asked:]), (mass * forced)[asked:].sum()
            kept.append((read(mass_on_fact, order[:, :asked]), everywhere, always))
        fact_kept, mass_kept, forced_mass = map(torch.stack, zip(*kept, strict=True))
        return _Measured(fact_kept, mass_kept, on_fact.sum(), p[asked:].sum(), forced_mass)


def _split(x: Tensor, block: int, fill: float = 0.0) -> Tensor:
    """The last dimension in blocks, the last one filled up."""
    return F.pad(x, (0, -x.shape[-1] % block), value=fill).unflatten(-1, (-1, block))


@torch.no_grad()
def measure(model: Any, document: Document, grid: Grid) -> tuple[_Measured, bool]:
    """What each setting keeps of one document, and whether the model answers it. One dense forward pass."""
    probe, before = _Probe(grid, document, model.device), model.config._attn_implementation
    AttentionInterface.register(_NAME, probe)
    AttentionMaskInterface.register(_NAME, AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation(_NAME)
    try:
        tokens = torch.tensor([document.tokens], device=model.device)
        hidden = model.base_model(tokens, use_cache=False)[0][0, document.answer.start - 1 : document.answer.stop - 1]
        answered = torch.equal(model.get_output_embeddings()(hidden).argmax(-1), tokens[0, document.answer.start :])
    finally:
        model.set_attn_implementation(before)
    if not probe.layers:
        raise UsageError(
            f"model_type={model.config.model_type!r} has no causal attention to the whole context that others may "
            "compute in transformers: give a Llama-like model"
        )
    nothing = _Measured(*map(torch.zeros_like, next(iter(probe.layers.values()))))  # of layers with a window
    parts = zip(*(probe.layers.get(i, nothing) for i in range(model.config.num_hidden_layers)), strict=True)
    return _Measured(*(torch.stack(part).cpu() for part in parts)), answered


# ------------------------------------------------------------ the table


@dataclass(frozen=True)
class FactTable:
    """What each setting keeps and costs, and which groups (layer, KV head) look at facts."""

    sizes: tuple[int, int, int, int]  # layers, heads, KV heads, channels of a head
    settings: list[Setting]  # the grid: all groups choose alike
    mixed: list[Setting]  # `own` for the groups with most attention on facts, block means for the others
    groups: list[tuple[int, int, float]]  # (layer, KV head, share of the attention on facts), the highest first
    answered: int  # documents; `fact` counts these only, or all if there are none
    documents: int
    length: int  # of them, in tokens

    def exact_groups(self, share: float) -> list[list[int]]:
        """For each layer the KV heads that choose by exact scores; [] if all do."""
        chosen = {(layer, group) for layer, group, _ in self.groups[: round(share * len(self.groups))]}
        layers, _, groups, _ = self.sizes
        return [[g for g in range(groups) if (layer, g) in chosen] for layer in range(layers) if share < 1]

    def work(self, setting: Setting, length: int) -> tuple[float, float, float]:
        """Multiply-adds of a layer over `length` tokens: of dense attention, of the scores, of the chosen blocks."""
        _, heads, _, size = self.sizes
        read = min(setting.tokens, length)
        pairs, chosen = length * length / 2, read * (length - read / 2)
        scored = max(0.0, pairs - read * read / 2 - sum(FORCED) * setting.block * (length - read))
        per_pair = setting.exact * setting.channels + (1 - setting.exact) * size / setting.block
        return 2 * heads * size * pairs, heads * per_pair * scored, 2 * heads * size * chosen

    def speed(self, setting: Setting, length: int) -> float:
        """× dense of a forward pass of attention, estimated."""
        dense, scores, blocks = self.work(setting, length)
        return dense / DENSE_RATE / (LAUNCHES + scores / SCORE_RATE + blocks / BLOCK_RATES[setting.block])

    def faster_from(self, setting: Setting) -> int:
        """The length from which on the estimate calls it faster than dense attention; 0 if that never is."""
        return next((n for n in range(1024, LENGTHS[-1] + 1, 1024) if self.speed(setting, n) >= 1), 0)

    @cached_property
    def default(self) -> Setting:
        """What others are compared with: `own` for all groups, 16 blocks of 64, or the nearest to it."""
        own = [setting for setting in self.mixed if setting.exact == 1]
        return min(own, key=lambda s: (abs(s.tokens - 1024), abs(s.block - 64)))

    @cached_property
    def recommended(self) -> Setting:
        """Of the settings that keep nearly as much as the default, the fastest at 32k tokens by the estimate."""
        fact, mass = self.default.fact - FACT_LOSS, self.default.mass - MASS_LOSS
        return max((s for s in self.mixed if s.fact >= fact and s.mass >= mass), key=lambda s: self.speed(s, 32768))

    def stored(self, setting: Setting) -> dict[str, Any]:
        """The entry `tercet` of a config.json, which attn_implementation="tercet" reads."""
        blocks = NSAConfig(
            select_block=setting.block, select_count=setting.tokens // setting.block,
            select_initial=FORCED[0], select_local=FORCED[1],
        )  # fmt: skip
        exact = self.exact_groups(setting.exact)
        return {
            "gate": "none", "shared_kv": True, "branches": ["selected"], "compression": "mean", "selector": "own",
            "nsa": asdict(blocks), "dense_below": 0, **({"exact_groups": exact} if exact else {}),
        }  # fmt: skip

    def __str__(self) -> str:
        speeds = "".join(f"{f'{length >> 10}k':>7}" for length in LENGTHS)
        head = f"{'blocks':<11}{'chosen by':<32}{'fact %':>6}{'mass %':>8}{'free %':>8}{'work %':>8}{speeds}"
        best, default, held = self.recommended, self.default, sum(part for _, _, part in self.groups[:10])
        mixed = [self.line(s) for s in self.mixed if s.blocks in (best.blocks, default.blocks)]
        ranks = " ".join(f"{layer}.{group}" for layer, group, _ in self.groups[:10])
        lines = "\n".join([head, *map(self.line, self.settings), "", head, *mixed])
        where = f"below {self.faster_from(best):,} tokens" if self.faster_from(best) else "at every length"
        return f"""\
The dense model answers {self.answered} of {self.documents} facts in texts of {self.length:,} tokens.
fact, mass: kept of the attention on the fact, of all attention; free: of that outside the first and last two blocks
work: of dense attention at 32k. 8k to 128k: × dense in a forward pass, estimated from speeds of an H200

{lines}

{held:.0%} of the attention on facts is in {len(self.groups[:10])} of {len(self.groups)} groups (layer.KV head): {ranks}
recommended: {best.blocks}, {best.scorer} (the fastest at 32k that loses at most {100 * FACT_LOSS:.0f} point of facts
and of mass against {default.blocks}, {default.scorer})
{where} dense attention is faster by the estimate"""

    def line(self, setting: Setting) -> str:
        kept = "".join(f"{100 * part:>8.1f}" for part in (setting.fact, setting.mass, setting.free))
        text = f"{setting.blocks:<11}{setting.scorer:<30}{kept}"
        if setting.scorer == ORACLE:
            return text
        dense, *work = self.work(setting, 32768)
        return f"{text}{100 * sum(work) / dense:>8.1f}" + "".join(f"{self.speed(setting, n):>7.2f}" for n in LENGTHS)


def fact_table(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str] | None = None,
    *,
    length: int = 4096,
    facts: int = 16,
    blocks: Sequence[int] = BLOCKS,
    tokens: Sequence[int] = TOKENS,
    progress: Callable[[int], None] = lambda tokens: None,
) -> FactTable:
    """Measure what settings of block-sparse attention keep of a dense model's attention on planted facts.

    model      a causal model of transformers
    documents  text to plant facts in; default: Python's own documentation
    length     tokens of each text that is read; counts of more than half of it are left out
    facts      texts to read, with one fact each
    progress   called with the tokens of each forward pass
    """
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    partial_rotation = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1) != 1
    channels = (*(c for c in CHANNELS if c < size and not partial_rotation), size)
    grid = Grid(tuple(blocks), tuple(n for n in tokens if n <= length // 2), channels)
    text = None if documents is None else "\n".join(documents)
    measured, answers = [], []
    for document in plant_facts(tokenizer, text, length=length, count=facts):
        found, answered = measure(model, document, grid)
        measured.append(found)
        answers.append(answered)
        progress(length)
    known = torch.tensor(answers if any(answers) else [True] * facts).double()
    all_ = _Measured(*(torch.stack(part).double() for part in zip(*measured, strict=True)))
    known = known[:, None, None]
    all_ = all_._replace(fact=all_.fact * known[..., None, None, None], fact_total=all_.fact_total * known)
    own, means = channels.index(32 if 32 in channels else size) + 1, len(grid.scorers) - 1
    settings, mixed = [], []
    for b, t in itertools.product(range(len(grid.blocks)), range(len(grid.tokens))):
        made = partial(Setting, grid.blocks[b], grid.tokens[t])
        for s, (name, read) in enumerate(zip(grid.scorers, (0, *channels, 0), strict=True)):
            settings.append(made(name, read, float(name != MEANS), *_kept(all_, b, t, s)))
        for share in SHARES:
            name = {1.0: grid.scorers[own], 0.0: MEANS}.get(share, f"{grid.scorers[own]}: {share:.0%} of groups")
            mixed.append(made(name, channels[own - 1], share, *_kept(all_, b, t, own, means, share)))
    on_facts = all_.fact_total.sum(0)
    order, parts = on_facts.flatten().argsort(descending=True).tolist(), (on_facts / on_facts.sum()).flatten().tolist()
    groups = [(*divmod(i, on_facts.shape[1]), parts[i]) for i in order[: _groups(all_)]]
    sizes = len(on_facts), config.num_attention_heads, on_facts.shape[1], size
    return FactTable(sizes, settings, mixed, groups, sum(answers), facts, length)


def _groups(all_: _Measured) -> int:
    """How many groups were measured: not those of layers with a window."""
    return int((all_.mass_total[0] > 0).sum())


def _kept(all_: _Measured, b: int, t: int, scorer: int, other: int = 0, share: float = 1.0) -> tuple[float, ...]:
    """The shares kept of facts, of all attention, and of attention on free blocks, with block size b, count t, and
    `scorer` for a share of the groups. Half of the documents rank them for the other half."""
    half = torch.arange(len(all_.fact)) % 2
    exact = torch.empty(all_.fact_total.shape, dtype=torch.bool)
    for one in (0, 1):
        ranks = all_.fact_total[half != one] if len(half) > 1 else all_.fact_total
        order = ranks.sum(0).flatten().argsort(descending=True)
        chosen = torch.zeros(len(order), dtype=torch.bool)
        chosen[order[: round(share * _groups(all_))]] = True
        exact[half == one] = chosen.view(exact.shape[1:])
    fact, mass = (torch.where(exact, x[..., b, scorer, t], x[..., b, other, t]).sum() for x in (all_.fact, all_.mass))
    total, forced = all_.mass_total.sum(), all_.forced[..., b].sum()
    return float(fact / all_.fact_total.sum()), float(mass / total), float((mass - forced) / (total - forced))


def store_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write the entry `tercet` of the folder's config.json."""
    file = folder / "config.json"
    write_json(file, json.loads(file.read_text(encoding="utf-8")) | {"tercet": settings})
