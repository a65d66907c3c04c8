"""Text streaming: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tercet.data.tokenizers import ByteTokenizer, LibraryTokenizer
from tercet.inference.generate import Detokenizer


def pushed(text: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = Detokenizer(ByteTokenizer(), stop)
    pieces = []
    for token in text:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.end()], stream.stopped


def test_only_whole_characters_are_given():
    pieces, _ = pushed("a→é".encode())
    assert pieces == ["a", "", "", "→", "", "é", ""]


def test_undecodable_bytes_do_not_hold_back_the_rest():
    pieces, _ = pushed(b"\xff\xff\xff\xff\xffabc")
    assert "".join(pieces).endswith("abc")
    assert "".join(pieces).count("\ufffd") == 5


def test_pieces_add_up_to_the_decoded_text_whatever_the_bytes():
    draws = random.Random(0)
    for _ in range(300):
        text = bytes(draws.choice(b"a\xe2\x82\xac\xf0\x9f\xff") for _ in range(draws.randrange(1, 12)))
        assert "".join(pushed(text)[0]) == ByteTokenizer().decode(list(text))


def test_a_space_between_prompt_and_answer_is_kept():
    words = {word: i for i, word in enumerate(("<unk>", "</s>", "▁the", "▁cat"))}
    library = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = LibraryTokenizer(library, "words")
    stream = Detokenizer(tokenizer, prompt=[2])
    assert [stream.push(3), stream.push(2), stream.end()] == [" cat", " the", ""]


@pytest.mark.parametrize("text", ["ab", "aSTb", "aS", "aSTOb", "STSTSTO"])
def test_the_start_of_a_stop_string_is_returned_at_the_end(text):
    pieces, stopped = pushed(text.encode(), ("STOP",))
    assert "".join(pieces) == text
    assert not stopped


def test_nothing_of_a_stop_string_is_ever_given():
    pieces, stopped = pushed(b"a STSTOP b", ("STOP", "xyz"))
    assert "".join(pieces) == "a ST"
    assert stopped
