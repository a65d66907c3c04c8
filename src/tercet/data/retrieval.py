"""Keys, values and sentence templates of retrieval exercises, and the random choices that they are made of.

Training (data.retrieval) uses TRAINING_WORDS and TRAINING_WORDINGS, evaluation (`tercet eval ruler`) HELD_OUT_WORDS and
HELD_OUT_WORDINGS (with --wording training, those of training); nothing is in both.
Words are lists. A number or made-up string stands for an integer, and is held out if that integer is 3 modulo 7:
training never draws one of those, evaluation no others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import NamedTuple, TypeVar

from tercet.data.order import key, random_u64

VERSION = 5  # part of a run's data identity: change it when the same key gives other lines
MODULUS, REMAINDER = 7, 3  # of held-out integers
_CONSONANTS, _VOWELS, _ENDS = "bcdfghjklmnprstvwz", "aeiouy", "gkvxz"  # no word of the lists ends so
_BLOCK = 256

T = TypeVar("T")


class Draws:
    """Random choices as a function of a key: the n-th draw depends on the key and n only."""

    def __init__(self, *parts: int) -> None:
        self._key, self._blocks = key(*parts), 0
        self._values: list[int] = []

    def u64(self) -> int:
        if not self._values:
            self._values = random_u64(key(self._key, self._blocks), _BLOCK).tolist()
            self._blocks += 1
        return self._values.pop()

    def below(self, bound: int) -> int:
        """An integer in [0, bound); bound may exceed 64 bits."""
        value, size = self.u64(), 1 << 64
        while size < bound << 16:
            value, size = value << 64 | self.u64(), size << 64
        return value % bound

    def uniform(self) -> float:
        return (self.u64() >> 11) * 2.0**-53

    def choice(self, options: Sequence[T]) -> T:
        return options[self.u64() % len(options)]

    def log_uniform(self, low: float, high: float) -> float:
        """A number in [low, high), each doubling equally likely."""
        return low * (high / low) ** self.uniform()

    def shuffled(self, items: Sequence[T]) -> list[T]:
        result = list(items)
        for i in range(len(result) - 1, 0, -1):
            j = self.u64() % (i + 1)
            result[i], result[j] = result[j], result[i]
        return result


@dataclass(frozen=True)
class Words:
    """Where keys and values come from; every method draws one."""

    words: tuple[str, ...]
    held_out: bool

    def integer(self, draws: Draws, low: int, high: int) -> int:
        """An integer in [low, high) on this side of the split."""
        value = low + draws.below(high - low - MODULUS)
        if self.held_out:
            return value + (REMAINDER - value) % MODULUS
        return value + (value % MODULUS == REMAINDER)

    def word(self, draws: Draws) -> str:
        return draws.choice(self.words)

    def pair(self, draws: Draws, joint: str = "-") -> str:
        return f"{draws.choice(self.words)}{joint}{draws.choice(self.words)}"

    def number(self, draws: Draws, digits: int = 7) -> str:
        return str(self.integer(draws, 10 ** (digits - 1), 10**digits))

    def hexadecimal(self, draws: Draws, digits: int) -> str:
        return f"{self.integer(draws, 0, 16**digits):0{digits}x}"

    def uuid(self, draws: Draws) -> str:
        text = self.hexadecimal(draws, 32)
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def letters(self, draws: Draws, count: int) -> str:
        return self._spell(draws, [ascii_lowercase] * count)

    def coined(self, draws: Draws) -> str:
        """A pronounceable made-up word of five letters."""
        return self._spell(draws, [_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _ENDS])

    def _spell(self, draws: Draws, alphabets: Sequence[str]) -> str:
        """An integer as a string with one letter of each alphabet."""
        value, text = self.integer(draws, 0, math.prod(map(len, alphabets))), ""
        for letters in reversed(alphabets):
            value, letter = divmod(value, len(letters))
            text = letters[letter] + text
        return text

    def key(self, draws: Draws) -> str:
        """A key of any kind."""
        kind = draws.below(8)
        if kind < 3:
            return self.pair(draws)
        if kind < 5:
            return self.pair(draws, "_")
        if kind == 5:
            return self.coined(draws)
        return self.hexadecimal(draws, 8) if kind == 6 else self.uuid(draws)

    def value(self, draws: Draws) -> str:
        """A value of any kind."""
        kind = draws.below(8)
        if kind < 4:
            return self.number(draws, 4 + draws.below(6))
        if kind == 4:
            return self.hexadecimal(draws, draws.choice((6, 8, 12, 16)))
        if kind == 5:
            return self.uuid(draws)
        return self.word(draws) if kind == 6 else self.pair(draws)


_TRAINING = """
acorn agate alder amber anchor apple apron arrow aspen atlas autumn bamboo banner barley basil basket beacon beaver
bench birch bishop blanket blossom bottle bramble brass breeze bridge bronze brook bucket butter cabin cactus camel
candle canoe canvas canyon carbon cargo carpet carrot castle cedar cellar cherry chestnut chisel cinder citrus clover
cobalt cobble coconut comet copper coral cotton cradle crane crater cricket crimson crystal curtain cypress dagger daisy
dancer desert diamond dolphin donkey dragon drizzle drum eagle ember emerald engine falcon farmer feather fennel fern
ferry fiddle finch flannel flute fossil fountain fox frost galaxy garden garlic garnet gazelle ginger glove goblet gold
granite grape gravel guitar hammer hammock harvest hazel heather helmet heron hickory honey hornet indigo iris iron
island ivory jacket jaguar jasmine jasper jewel jungle juniper kernel kestrel kettle kitten ladder lagoon lake larch
laurel lavender leather lemon leopard lily linen lion lizard lobster locket lotus lynx magnet magpie mango maple marble
maroon marsh meteor mint mirror mitten molten monkey moss mountain mulberry mustard nectar needle nickel nutmeg oak
oasis ocean olive onyx opal orange orchid osprey otter oyster paddle palace panther paper parrot pastel peach pearl
pebble pelican pepper petal pigeon pillow pine planet plum pocket pollen pony poplar poppy prairie prism puffin pumpkin
purple quartz quill rabbit raven reef ribbon river robin rocket rose ruby rustic saffron sage salmon sapphire satin
scarlet sequoia shadow shell silver slate sparrow spice spider spruce stable starling steel stone storm summer swan
tangerine teal temple thimble thistle thunder tiger timber topaz tornado trumpet tulip tundra turtle twilight umbrella
valley vanilla velvet violet walnut walrus willow window winter wolf yarrow yellow zebra zinc
"""

_HELD_OUT = """
abbey almond alpaca anvil apricot armour avocado badger balcony ballad basalt beetle bellows bison bobbin bonfire burrow
buttress cameo caramel cathedral cello charcoal chimney cicada cider clarinet cloak cougar coyote cranberry crocus
crouton cymbal delta domino dormouse dune ebony elbow elderberry elk envelope falafel fathom fig flamingo flint foghorn
gable galleon gannet gecko geyser gherkin glider gondola gourd griffin grotto halibut harp hedge hemlock hyena ibis
icicle inkwell jackal jetty kale kelp kiln kiwi krill lacquer lantana lattice lichen limerick mallard mandolin
marigold marmot mastiff meerkat mongoose moose mosaic nougat nuthatch oboe ocelot okra origami outpost oxbow papaya
parchment parsnip pavilion pewter pheasant piccolo pistachio plaza plover polka porcelain puma quail quarry quince
quiver raccoon radish raft rhubarb rosemary rye scallop sextant shamrock shovel sickle skylark sloth snail sorrel
spindle squid stork sundial tassel teapot terrace toffee tortoise toucan trellis truffle trout tugboat turnip
turret urchin vault viaduct vulture wagon warbler wasp weasel wharf wicker wigwam wombat yak yogurt zeppelin zither
"""

TRAINING_WORDS = Words(tuple(_TRAINING.split()), held_out=False)
HELD_OUT_WORDS = Words(tuple(_HELD_OUT.split()), held_out=True)


# Training has only 16 templates for single facts: with thousands, each seen rarely, a model found fewer facts
# (docs/lab-notes/learned-selection.md).


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
