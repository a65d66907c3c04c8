"""Text streaming: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import pytest

from tercet.data.tokenizers import ByteTokenizer
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


@pytest.mark.parametrize("text", ["ab", "aSTb", "aS", "aSTOb", "STSTSTO"])
def test_the_start_of_a_stop_string_is_returned_at_the_end(text):
    pieces, stopped = pushed(text.encode(), ("STOP",))
    assert "".join(pieces) == text
    assert not stopped


def test_nothing_of_a_stop_string_is_ever_given():
    pieces, stopped = pushed(b"a STSTOP b", ("STOP", "xyz"))
    assert "".join(pieces) == "a ST"
    assert stopped
