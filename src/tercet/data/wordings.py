"""Wordings of retrieval exercises: facts and questions of training, and those held out from it.

Training composes the wording of a fact and of its question from parts, so that a model has to look for the key and
cannot rely on a sentence that it knows. `tercet eval ruler` uses the held-out wordings, or those of training with
--wording training. No held-out wording can be composed, and none of its characteristic words is among the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from tercet.data.retrieval import Draws


class Pair(NamedTuple):
    """One fact about a key, and the question for it: `ask`, the answer, `end`. {what} is the name of the property."""

    fact: str
    ask: str
    end: str = ""  # without fields


class Chain(NamedTuple):
    """A variable with a value, copies of it, and the question which variables have that value."""

    value: str
    copy: str
    ask: str
    end: str = ""


class WordList(NamedTuple):
    """A list of words, and the question for the most common ones."""

    title: str
    entry: str  # {number}, {word}
    joint: str
    ask: str  # {count}
    end: str = ""


@dataclass(frozen=True)
class Wordings:
    """How facts and questions are phrased."""

    whats: tuple[str, ...]
    pair: Callable[[Draws], Pair]
    values: tuple[tuple[str, str], ...]  # question for all values of {key}, and what follows the answers
    keys: tuple[tuple[str, str], ...]  # question for the values of several {keys}
    chains: tuple[Chain, ...]
    lists: tuple[WordList, ...]  # the answer is in the order of first appearance
    ranked_lists: tuple[WordList, ...]  # the answer is in the order of frequency
    filler: tuple[str, ...]  # sentences without information, for repeated filler


# Parts of the training wordings.

_MARKS = ("", "", "", "", "# ", "// ", "- ", "> ", "-- ", "; ", "* ", "% ")
_OPENINGS = (
    "", "", "", "", "Note: ", "Note that ", "Remember that ", "Keep in mind: ", "It is known that ", "By the way, ",
    "According to the log, ", "Important: ", "From now on, ", "In short, ",
)  # fmt: skip
_SUBJECTS = (
    "the {what} for {key}", "the {what} of {key}", "the {what} at {key}", "the {what} belonging to {key}",
    "the {what} listed for {key}", "the current {what} in {key}", "the value of {key}", "{key}'s {what}", "{key}",
)  # fmt: skip
_VERBS = (
    "is", "is", "equals", "is now", "is still", "was set to", "has become", "must be", "is given as",
    "turned out to be", "changed to", "=",
)  # fmt: skip
_SENTENCES = (
    "{key} has the {what} {value}", "as its {what}, {key} uses {value}", "for {key}, use the {what} {value}",
    "to reach {key}, dial {value}", "{key} answers to the {what} {value}", "{key} was given {value}",
    "if somebody asks about {key}, say {value}", "whoever calls {key} gets {value}",
    "{value} is the {what} of {key}", "{value} belongs to {key}", "use {value} for {key}", "put {value} into {key}",
    "you can reach {key} at {value}", "we chose {value} as the {what} of {key}", "{value} stands for {key}",
)  # fmt: skip
_RECORDS = (
    "{key} = {value}", "{key}={value}", "{key}: {value}", "{key} {value}", "{key}\t{value}", "{key},{value}",
    "{key} -> {value}", "[{key}] {value}", "{key} ({what}): {value}", "{key} | {what} | {value}",
    "{what} {key}: {value}", "{what} of {key} -> {value}", "SET {key} = {value}", "export {key}={value}",
    "let {key} = {value};", "#define {key} {value}", "def {key}(): return {value}", 'TABLE["{key}"] = "{value}"',
    '"{key}": "{value}",', '"name": "{key}", "value": "{value}"', "<item id={key}>{value}</item>",
    "{key}.put({value})", "({key} . {value})", "key={key} value={value}", "name: {key}; {what}: {value}",
    "{value}  # {key}", "{value} ({key})", "{value} -> {key}", "{value},{key}", "{value} AS {key}",
)  # fmt: skip
_QUESTIONS = (
    "What is {subject}? {value}", "Q: What is {subject}? A: {value}", "Question: {subject}? Answer: {value}",
    "As noted above, {subject} {verb} {value}.", "So {subject} {verb} {value}.", "Complete: {subject} {verb} {value}",
    "Do you remember {subject}? {value}", "Tell me {subject}: {value}", "Which {what} belongs to {key}? {value}",
    "Which {what} does {key} have? {value}",
)  # fmt: skip
_QUERIES = (
    "GET {key} = {value}", "{key}? {value}", "{key} = {value}", "{key}: {value}", "{key} -> {value}",
    "get({key}) = {value}", "assert {key} == {value}", 'assert TABLE["{key}"] == "{value}"', "print({key})  # {value}",
    ">>> {key}()  # {value}", "<get id={key}>{value}</get>", "value of {key}: {value}", "if {key} == {value}:",
)  # fmt: skip
_COMMON = """
about after again all also any around at back before behind below between both came can come down during early end even
every far few find for from full gave give good great half he high how in into it just keep kept know large late left
like line long look made make many may more much near new next no now off often old on only open our out over own page
part place plain put right room round same saw say she short show side small so some soon still such take than their
them then there these they thing this those through time today too took turn two until up upon us very was way we well
went what when where which while who why work year yet you
"""
_WORDS = tuple(_COMMON.split())
_JOINTS = (" ", " ", " ", " ", ", ", ": ", " - ", " / ", "; ")


def training_pair(draws: Draws) -> Pair:
    """A fact, asked for by its own beginning or in other words."""
    kind = draws.below(3)
    if kind == 0:
        fact = _sentence(draws)
    elif kind == 1:
        fact = draws.choice(_RECORDS)
    else:
        fact = _invented(draws, key_first=draws.below(6) > 0)
    fact = draws.choice(_MARKS) + fact
    repeated = _key_first(fact) and draws.below(2)
    ask, _, end = (fact if repeated else draws.choice(_MARKS) + _question(draws)).partition("{value}")
    return Pair(fact, ask, end)


def _key_first(fact: str) -> bool:
    return fact.index("{key}") < fact.index("{value}")


def _sentence(draws: Draws) -> str:
    said = f"{draws.choice(_SUBJECTS)} {draws.choice(_VERBS)} {{value}}" if draws.below(2) else draws.choice(_SENTENCES)
    text = draws.choice(_OPENINGS) + said
    return f"{text[0].upper()}{text[1:]}{draws.choice(('.', '.', '', '!', ';'))}"


def _question(draws: Draws) -> str:
    kind = draws.below(4)
    if kind == 0:
        return _invented(draws, key_first=True)
    if kind == 1:
        return draws.choice(_QUERIES)
    text = draws.choice(_QUESTIONS).replace("{subject}", draws.choice(_SUBJECTS))
    return text.replace("{verb}", draws.choice(_VERBS))


def _invented(draws: Draws, *, key_first: bool) -> str:
    """A key and a value among words without meaning."""
    joint, case = draws.choice(_JOINTS), draws.choice((str.lower, str.lower, str.capitalize, str.upper))
    before, between, after = (case(" ".join(draws.choice(_WORDS) for _ in range(draws.below(4)))) for _ in range(3))
    first, second = ("{key}", "{value}") if key_first else ("{value}", "{key}")
    return joint.join(part for part in (before, first, between, second, after) if part)


TRAINING_WORDINGS = Wordings(
    whats=tuple(
        f"{kind} {name}"
        for kind in (
            "access", "account", "badge", "batch", "entry", "order", "project", "room", "route", "serial", "service",
            "tracking",
        )
        for name in ("code", "id", "key", "label", "mark", "name", "number", "phrase", "reference", "value")
    ),
    pair=training_pair,
    values=tuple(
        (mark + ask, end)
        for mark in ("", "# ", "- ")
        for ask, end in (
            ("All values of {key}: ", ""),
            ("Every {what} of {key}: ", ""),
            ("LIST {key} = ", ""),
            ("{key} = [", "]"),
            ("The {what}s given for {key}, in order, are ", "."),
            ("What are the {what}s of {key}? ", ""),
            ("{key} has the {what}s ", "."),
            ("In order of appearance, {key}: ", ""),
        )
    ),
    keys=tuple(
        (mark + ask, end)
        for mark in ("", "# ", "- ")
        for ask, end in (
            ("The {what}s for {keys} are ", "."),
            ("GET {keys} = ", ""),
            ("({keys}) = (", ")"),
            ("{what} of each of {keys}: ", ""),
            ("Question: what are the values of {keys}? Answer: ", ""),
            ("What are the {what}s of {keys}? ", ""),
            ("{keys} have the {what}s ", ", in this order."),
            ("{keys} -> ", ""),
        )
    ),
    chains=tuple(
        Chain(value, copied, ask, end)
        for value, copied in (
            *(
                (f"{start}{{name}}{joint}{{value}}{stop}", f"{start}{{name}}{joint}{{source}}{stop}")
                for start, joint, stop in product(("", "let ", "var "), (" = ", " <- ", " is ", ": "), ("", ";"))
            ),
            ("SET {name} {value}", "COPY {source} {name}"),
            ("{value} -> {name}", "{source} -> {name}"),
        )
        for ask, end in (
            ("# names equal to {value}: ", ""),
            ("FIND {value}: ", ""),
            ("The names that are {value}: ", "."),
            ("which names hold {value}? ", ""),
            ("{value} is the value of ", "."),
        )
    ),
    lists=(
        WordList("Words:\n", "{number}. {word}", " ", "The {count} most common words in the list are "),
        WordList("# words: ", "{word}", ", ", "# top {count}, by first appearance: "),
        WordList("WORDS ", "{word}", " ", "COMMON {count}: "),
    ),
    ranked_lists=(
        WordList("Code text: ", "{word}", " ", "Its {count} most frequent words, most frequent first: "),
        WordList("# stream: ", "{word}", " ", "# {count} most frequent, ranked: "),
        WordList("TOKENS\n", "{word}", " ", "RANK {count}: "),
    ),
    filler=(
        "The wind is cold.", "The street is wet.", "The bread is warm.", "We go on.", "Left and right again.",
    ),
)  # fmt: skip


def _evaluated_pair(draws: Draws) -> Pair:
    pair = training_pair(draws)
    while not _key_first(pair.fact):
        pair = training_pair(draws)
    return pair


# In evaluation the key comes first, as in RULER: a value before its key takes another skill to find.
EVALUATED_TRAINING_WORDINGS = replace(TRAINING_WORDINGS, pair=_evaluated_pair)

HELD_OUT_PAIRS = (
    Pair("One lock has a name and a secret: {key} opens with {value}.", "The secret that opens {key} is ", "."),
    Pair("Hear ye: the {what} assigned to {key} reads {value}.", "The {what} assigned to {key} reads ", "."),
    Pair("/* {what} {key} => {value} */", "/* {what} {key} => ", " */"),
    Pair("STORE {value} UNDER {key}", "FETCH {key} RETURNS "),
    Pair("Visitors to {key} will need its {what}, {value}.", "Visitors to {key} will need its {what}, ", "."),
    Pair("register({key!r}, {value!r})", "lookup({key!r}) -> '", "'"),
)

HELD_OUT_WORDINGS = Wordings(
    whats=("locker combination", "docking permit", "archive tag", "ticket", "seal", "call sign"),
    pair=lambda draws: draws.choice(HELD_OUT_PAIRS),
    values=(
        ("Everything stored under {key}, first to last: ", "."),
        ("/* each {what} seen with {key} */ ", ""),
    ),
    keys=(
        ("Respectively, the {what}s assigned to {keys} read ", "."),
        ("FETCH EACH OF {keys} RETURNS ", ""),
    ),
    chains=(
        Chain("VARIABLE {name} := {value}", "VARIABLE {name} := VARIABLE {source}", "VARIABLES WITH {value} := "),
        Chain("bind {name} to {value}", "bind {name} to {source}", "bound to {value} are ", "."),
    ),
    lists=(
        WordList("Here is an enumeration. ", "({number}) {word}", " ", "Its {count} usual members, as met: "),
        WordList("/* vocabulary */ ", "{word}", "; ", "/* the {count} that repeat most */ "),
    ),
    ranked_lists=(
        WordList("Transcript of signals follows. ", "{word}", " ", "The {count} leading signals by count were "),
        WordList("/* signals */ ", "{word}", " ", "/* {count} leading signals */ "),
    ),
    filler=(
        "The grove is quiet.", "The tide is low.", "The clock is slow.", "On they walked.", "Out and home once more.",
    ),
)  # fmt: skip
