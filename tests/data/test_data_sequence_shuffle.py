"""data.shuffle_sequences: nothing lost or repeated, exact resume, the same on any number of ranks."""

from __future__ import annotations

import hashlib
import tracemalloc

import pytest

from tercet.config.data import DataConfig
from tercet.data.loader import build_loader
from tercet.data.stream import DataError
from tercet.data.tokenizers import load_tokenizer


def shuffled(data, block=12, **changes):
    return data.model_copy(update={"shuffle_sequences": block, **changes})


def sequences(batches):
    """(tokens, targets) of every sequence, in order."""
    return [(tuple(t.tolist()), tuple(y.tolist())) for b in batches for t, y in zip(b.tokens, b.targets, strict=True)]


@pytest.mark.parametrize("kind", ["text", "jsonl", "shards", "recall"])
def test_every_block_is_a_permutation_of_its_sequences(kind, configs, read):
    plain = sequences(read(configs[kind], 24, sequences=4))
    mixed = sequences(read(shuffled(configs[kind]), 24, sequences=4))
    assert mixed != plain
    for at in range(0, 96, 12):
        assert sorted(mixed[at : at + 12]) == sorted(plain[at : at + 12])


@pytest.mark.parametrize("kind", [pytest.param("text", marks=pytest.mark.slow), "jsonl", "mixture"])
def test_resuming_after_any_batch_is_exact(kind, configs, assert_resumes):
    assert_resumes(shuffled(configs[kind], block=5), 40, every=3)  # batches span blocks


def test_ranks_together_read_what_one_rank_reads(configs, assert_ranks_share):
    assert_ranks_share(shuffled(configs["jsonl"]), 4)


def test_every_sequence_is_delivered_once_by_the_end_of_the_data(configs, read):
    data = configs["jsonl"].model_copy(update={"exhaustion": "stop"})
    plain, mixed = (sequences(read(d, 10_000, sequences=4)) for d in (data, shuffled(data, block=64)))
    padding = [s for s in plain if set(s[1]) == {-100} and len(set(s[0])) == 1]
    assert sorted(s for s in mixed if s not in padding) == sorted(s for s in plain if s not in padding)
    assert len(mixed) - len(plain) < 4


@pytest.mark.parametrize("exhaustion", ["repeat", "stop"])
@pytest.mark.parametrize("kind", [pytest.param("text", marks=pytest.mark.slow), "jsonl", "shards", "mixture"])
def test_counts_equal_those_of_as_many_sequences_in_packing_order(kind, exhaustion, configs, read):
    """A block that spans ten epochs does not count as ten epochs read."""
    data = configs[kind].model_copy(update={"exhaustion": exhaustion})
    plain = [b.stats for b in read(data, 400, sequences=7)]
    assert plain[-1].epoch >= 1 if exhaustion == "repeat" else plain[-1].padding > 0
    for block in (10, 7000):
        assert [b.stats for b in read(shuffled(data, block), 400, sequences=7)] == plain


def test_counts_with_padding_equal_those_of_as_many_non_padding_sequences(configs, read):
    """A sequence with only an EOS that spilled over from a full one, and padding, is not delivered."""
    data = configs["jsonl"].model_copy(update={"packing": "whole"})
    plain = read(data, 600, sequences=1)
    delivered = [b for b in plain if b.tokens.any() or (b.targets != -100).any()]
    assert len(delivered) < len(plain)
    expected = [b.stats._replace(sequences=n) for n, b in enumerate(delivered, start=1)]
    for block in (10, 7000):
        assert [b.stats for b in read(shuffled(data, block), len(delivered), sequences=1)] == expected


def test_cursors_of_older_checkpoints_resume_in_the_same_order(configs, read):
    data = shuffled(configs["recall"])
    first = read(data, 7, sequences=4)
    assert hashlib.sha256(repr(sequences(first)).encode()).hexdigest()[:16] == "c20724b65bbc0c4e"
    facts = {"format": 1, "identity": first[0].state["identity"]}
    counts = {"epoch": 0, "documents": 3, "skipped": 0, "left_out": 0, "number": 3}
    start = {**facts, "cursor": counts, "offset": 168, "tokens": 768, "padding": 0, "sequences": 12}
    then = {"block": 12, "seq_len": 64, "start": start, "index": 1, "done": 4, "handed": 16}
    assert first[3].state == {**facts, "shuffle": then}
    assert sequences(read(data, 3, sequences=4, state={**facts, "shuffle": then})) == sequences(first[4:])


def test_validation_is_not_shuffled(configs, read):
    data = configs["jsonl"]
    plain, mixed = (sequences(read(d, 50, split="validation")) for d in (data, shuffled(data)))
    assert plain == mixed


def test_block_settings_cannot_change_inside_a_block(configs, read):
    data = shuffled(configs["jsonl"])
    state = read(data, 1, sequences=4)[-1].state
    with pytest.raises(DataError, match=r"data\.shuffle_sequences was 12 and is 7"):
        read(shuffled(data, block=7), 0, sequences=4, state=state)  # before the first batch is read
    with pytest.raises(DataError, match=r"data\.shuffle_sequences was 12 and is 0"):
        read(configs["jsonl"], 0, sequences=4, state=state)
    with pytest.raises(DataError, match=r"data\.seq_len was \d+ and is 160"):
        read(shuffled(data, seq_len=160), 0, sequences=4, state=state)
    between = read(data, 3, sequences=4)[-1].state
    assert len(read(shuffled(data, block=7), 2, sequences=4, state=between)) == 2
    with pytest.raises(DataError, match=r"data\.shuffle_sequences was 12 and is 0"):
        read(configs["jsonl"], 0, sequences=4, state=between)  # plain packing cannot read its cursor
    plain = read(configs["jsonl"], 2, sequences=4)[-1].state
    assert len(read(data, 2, sequences=4, state=plain)) == 2


@pytest.mark.parametrize("tokenizer", ["byte", "small_bpe"])
def test_one_block_is_in_memory_at_a_time_and_takes_the_estimated_size(tokenizer, small_bpe):
    name = "byte" if tokenizer == "byte" else str(small_bpe)
    data = DataConfig(source="synthetic", tokenizer=name, seq_len=8192, shuffle_sequences=200, prefetch=0)
    estimated = data.shuffle_bytes(load_tokenizer(name).vocab_size)
    tracemalloc.start()
    try:
        with build_loader(data, seed=7, batch_sequences=3) as loader:
            for _ in range(70):  # one batch spans two blocks
                next(loader)
            held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert estimated <= held <= peak < 1.5 * estimated


STAGES = ((64, 4, 7), (160, 2, 5), (32, 8, 6))  # sequence length, sequences per batch, batches


@pytest.mark.parametrize("kind", ["text", "jsonl", "shards"])
@pytest.mark.parametrize("block", [0, 5, 1000])
def test_stages_of_other_lengths_read_every_token_once(kind, block, configs, read):
    """At the end of a stage the loader continues at the cursor: nothing is lost in a block, in a batch or between."""
    tokens = sum(length * size * count for length, size, count in STAGES)
    plain = read(configs[kind].model_copy(update={"seq_len": 32}), tokens // 32, sequences=1)
    stream, state = [token for row, _ in sequences(plain) for token in row], None
    for length, size, count in STAGES:
        data = shuffled(configs[kind], block, seq_len=length)
        got = read(data, count, sequences=size, state=state, limit=size * count)
        resumed = read(data, count - 3, sequences=size, state=got[2].state, limit=size * (count - 3))
        assert sequences(resumed) == sequences(got[3:])
        assert resumed[-1].state == got[-1].state
        rows, stream = stream[: length * size * count], stream[length * size * count :]
        packed = [tuple(rows[at : at + length]) for at in range(0, len(rows), length)]
        delivered = [row for row, _ in sequences(got)]
        assert sorted(delivered) == sorted(packed) if block else delivered == packed
        state = got[-1].state


def test_a_block_keeps_its_size_when_the_end_of_its_stage_has_moved(configs, read):
    data = shuffled(configs["jsonl"], block=12)
    short = read(data, 5, sequences=4, limit=20)  # blocks of 12 and 8
    resumed = read(data, 4, sequences=4, state=short[3].state, limit=100)
    assert sequences(resumed[:1]) == sequences(short[4:])
    whole = sequences(read(configs["jsonl"], 8, sequences=4))
    assert sorted(sequences(short[:4]) + sequences(resumed)) == sorted(whole)
