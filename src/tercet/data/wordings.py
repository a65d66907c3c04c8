"""Sentence templates of facts and questions: those of retrieval exercises, and others held out for evaluation.

`tercet eval ruler` uses the held-out ones, or those of training with --wording training. Training has only 16 templates
for single facts: with thousands, each seen rarely, a model found fewer facts (docs/lab-notes/learned-selection.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
    pairs: tuple[Pair, ...]
    values: tuple[tuple[str, str], ...]  # question for all values of {key}, and what follows the answers
    keys: tuple[tuple[str, str], ...]  # question for the values of several {keys}
    chains: tuple[Chain, ...]
    lists: tuple[WordList, ...]  # the answer is in the order of first appearance
    ranked_lists: tuple[WordList, ...]  # the answer is in the order of frequency
    filler: tuple[str, ...]  # sentences without information, for repeated filler


TRAINING_WORDINGS = Wordings(
    whats=(
        "access code", "serial number", "tracking id", "order number", "pass phrase", "badge number", "batch id",
        "checksum", "port", "ledger entry", "signature", "account", "label", "reference",
    ),
    pairs=(
        Pair("The {what} for {key} is {value}.", "The {what} for {key} is ", "."),
        Pair("The {what} of {key} is {value}.", "What is the {what} of {key}? "),
        Pair("# The {what} for {key} is {value}.", "# The {what} for {key} is ", "."),
        Pair("# {key}: {what} {value}", "# {key}: {what} "),
        Pair("SET {key} = {value}", "GET {key} = "),
        Pair("{key} = {value}", "assert {key} == "),
        Pair("{key}: {value}", "{key}: "),
        Pair("Remember that {key} has the {what} {value}.", "As noted above, {key} has the {what} ", "."),
        Pair("// {what} of {key} -> {value}", "// {what} of {key} -> "),
        Pair("- {key} | {what} | {value}", "- {key} | {what} | "),
        Pair("Note: {value} is the {what} of {key}.", "Question: which {what} belongs to {key}? Answer: "),
        Pair('TABLE["{key}"] = "{value}"', 'assert TABLE["{key}"] == "', '"'),
        Pair('{{"name": "{key}", "value": "{value}"}}', '{{"name": "{key}", "value": "', '"}'),
        Pair("def {key}(): return {value}", "print({key}())  # "),
        Pair("For {key}, use the {what} {value}.", "Q: Which {what} is used for {key}?  A: "),
        Pair("<item id={key}>{value}</item>", "<get id={key}>", "</get>"),
    ),
    values=(
        ("All values of {key}: ", ""),
        ("# every {what} of {key}: ", ""),
        ("LIST {key} = ", ""),
        ("The {what}s given for {key}, in order, are ", "."),
    ),
    keys=(
        ("The {what}s for {keys} are ", "."),
        ("GET {keys} = ", ""),
        ("# {what} of each of {keys}: ", ""),
        ("Question: what are the values of {keys}? Answer: ", ""),
    ),
    chains=(
        Chain("{name} = {value}", "{name} = {source}", "# names equal to {value}: "),
        Chain("SET {name} {value}", "COPY {source} {name}", "FIND {value}: "),
        Chain("let {name} be {value}", "let {name} be {source}", "The names that are {value}: ", "."),
        Chain("{name} <- {value};", "{name} <- {source};", "which names hold {value}? "),
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

HELD_OUT_WORDINGS = Wordings(
    whats=("locker combination", "docking permit", "archive tag", "ticket", "seal", "call sign"),
    pairs=(
        Pair("One lock has a name and a secret: {key} opens with {value}.", "The secret that opens {key} is ", "."),
        Pair("Hear ye: the {what} assigned to {key} reads {value}.", "The {what} assigned to {key} reads ", "."),
        Pair("/* {what} {key} => {value} */", "/* {what} {key} => ", " */"),
        Pair("STORE {value} UNDER {key}", "FETCH {key} RETURNS "),
        Pair("Visitors to {key} will need its {what}, {value}.", "Visitors to {key} will need its {what}, ", "."),
        Pair("register({key!r}, {value!r})", "lookup({key!r}) -> '", "'"),
    ),
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
