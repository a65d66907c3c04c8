"""Special tokens are text in corpora and tokens in prompts. Conversations go through the tokenizer's chat template, and
only the assistant's part of them counts in the loss if data.loss_on says so."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tercet.config.data import DataConfig
from tercet.data import commands, tokenizers
from tercet.data.prepare import prepare
from tercet.data.stream import BadRecordError, DataUsageError
from tercet.data.tokenizers import load_tokenizer

CHATML = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# as of models that think: the last answer is rendered differently from earlier ones
THINKING = PLAIN.replace("message['content'] +", "('<think>' if loop.last else '') + message['content'] +", 1)
SAFE = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tool first') }}{% endif %}"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2? 🎉"},
    {"role": "assistant", "content": "  four 🎉"},
    {"role": "user", "content": "And\n3+3?"},
    {"role": "assistant", "content": "six"},
]
CHAT = "<|im_start|>user\nhi<|im_end|>\n"


@pytest.fixture
def tokenizer(small_bpe, tmp_path):
    """Writes a tokenizer with a chat template; returns its folder."""

    def write(template: str = PLAIN) -> str:
        from tokenizers import Tokenizer

        folder = tmp_path / f"tokenizer-{hash(template)}"
        folder.mkdir(exist_ok=True)
        library = Tokenizer.from_file(str(small_bpe))
        library.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
        library.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": {"content": "<s>", "__type": "AddedToken"},
            "eos_token": "<|endoftext|>",
            "chat_template": template,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return str(folder)

    return write


@pytest.fixture
def config(tmp_path, tokenizer):
    """A configuration that reads records with a chat template."""

    def build(records: list[dict], template: str = PLAIN, **changes) -> DataConfig:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        values = {
            "source": "jsonl", "path": str(path), "tokenizer": tokenizer(template), "text_field": "messages",
            "seq_len": 256, "validation_fraction": 0, "exhaustion": "stop", "shuffle": False, "prefetch": 0,
        }  # fmt: skip
        return DataConfig(**values | changes)

    return build


def text_and_learned(batch, data: DataConfig) -> tuple[str, list[str]]:
    """The text of a batch's first document, and its parts that count in the loss."""
    tokenizer = load_tokenizer(data.tokenizer)
    end = int(batch.cu_seqlens[1])
    tokens, targets = batch.tokens[0, :end].tolist(), batch.targets[0, : end - 1].tolist()
    parts, open_ = [], False
    for token, target in zip(tokens[1:], targets, strict=True):
        assert target in (-100, token)
        if target != -100:
            parts = parts if open_ else [*parts, []]
            parts[-1].append(token)
        open_ = target != -100
    return tokenizer.decode(tokens, specials=True), [tokenizer.decode(part, specials=True) for part in parts]


def test_special_tokens_are_text_in_a_corpus_and_tokens_in_a_prompt(tokenizer, tmp_path, read):
    from transformers import AutoTokenizer

    folder = tokenizer()
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode(CHAT, specials=True) == theirs(CHAT, add_special_tokens=False).input_ids
    assert len(ours.encode(CHAT)) > len(ours.encode(CHAT, specials=True)) + 10
    (tmp_path / "a.txt").write_text(CHAT)
    data = DataConfig(source="text", path=str(tmp_path / "a.txt"), tokenizer=folder, seq_len=64, validation_fraction=0)
    for specials in (False, True):
        (batch,) = read(data.model_copy(update={"special_tokens": specials}), 1, sequences=1)
        expected = [*ours.encode(CHAT, specials=specials), ours.eos_id]
        assert batch.tokens[0, : len(expected)].tolist() == expected


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_a_conversation_has_the_tokens_of_transformers(loss_on, config, read):
    from transformers import AutoTokenizer

    data = config([{"messages": MESSAGES}], CHATML, loss_on=loss_on)
    (batch,) = read(data, sequences=1)
    theirs = AutoTokenizer.from_pretrained(data.tokenizer).apply_chat_template(
        MESSAGES, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = theirs["input_ids"], np.array(theirs["assistant_masks"], dtype=bool)
    assert batch.tokens[0, : len(ids) + 1].tolist() == [*ids, 0], "and EOS"
    targets = batch.targets[0, : len(ids) - 1].numpy()
    counted = mask[1:] if loss_on == "assistant" else np.ones(len(ids) - 1, dtype=bool)
    assert np.array_equal(targets, np.where(counted, ids[1:], -100))


def test_conversations_encoded_together_equal_those_encoded_alone(tokenizer, monkeypatch):
    ours = load_tokenizer(tokenizer(CHATML))
    chats = [(f"{CHAT * n} 🎉{n}".encode(), [(2, 9 + n)]) for n in range(1, 7)]
    alone = [ours.encode_chats([chat])[0] for chat in chats]
    for limit in (1, 200, 1 << 20):  # bytes
        monkeypatch.setattr(tokenizers, "ENCODED_AT_ONCE", limit)
        for found, expected in zip(ours.encode_chats(chats), alone, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("record", "fields", "learned"),
    [
        ({"messages": MESSAGES}, {}, ["  four 🎉<|im_end|>\n", "six<|im_end|>\n<|endoftext|>"]),
        ({"messages": MESSAGES[:4]}, {}, ["  four 🎉<|im_end|>\n"]),
        ({"p": "2?", "c": "two"}, {"prompt_field": "p", "text_field": "c"}, ["two<|im_end|>\n<|endoftext|>"]),
        (
            {"p": MESSAGES[:4], "c": MESSAGES[4:]},
            {"prompt_field": "p", "text_field": "c", "loss_on": "all"},
            ["six<|im_end|>\n<|endoftext|>"],
        ),
        (
            {"p": MESSAGES[:4], "c": MESSAGES[4:]},
            {"prompt_field": "p", "text_field": "c"},
            ["six<|im_end|>\n<|endoftext|>"],
        ),
    ],
)  # fmt: skip
def test_only_the_assistant_is_learned(record, fields, learned, config, read):
    data = config([record], **{"loss_on": "assistant", **fields})
    (batch,) = read(data, sequences=1)
    text, found = text_and_learned(batch, data)
    assert found == learned
    assert text.startswith("<s><|im_start|>")


def test_tools_and_parquet_give_the_same_tokens_as_jsonl(config, tmp_path, read):
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + PLAIN.replace(
        "message['content']", "(message['content'] or message['tool_calls'] | tojson)"
    )
    call = [{"function": {"name": "f", "arguments": {"city": "Bonn"}}}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    records = [
        {"messages": [MESSAGES[1], {"role": "assistant", "tool_calls": call}], "tools": tools},
        {"messages": MESSAGES, "tools": None},
    ]
    jsonl = config(records, template, loss_on="assistant")
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    parquet = jsonl.model_copy(update={"source": "parquet", "path": (str(tmp_path / "a.parquet"),)})
    (one,), (other,) = read(jsonl, sequences=2), read(parquet, sequences=2)
    text, learned = text_and_learned(one, jsonl)
    assert '"name": "f"' in text.partition("<s>")[0]
    assert learned == ['[{"function": {"name": "f", "arguments": {"city": "Bonn"}}}]<|im_end|>\n<|endoftext|>']
    assert np.array_equal(one.tokens, other.tokens)
    assert np.array_equal(one.targets, other.targets)


@pytest.mark.parametrize(
    ("messages", "template", "reason"),
    [
        (MESSAGES[:2], PLAIN, "its messages have no text of the assistant"),
        (MESSAGES, THINKING, "first 3 messages differently when others follow.*generation"),
        ([{"role": "tool", "content": ""}, *MESSAGES], SAFE + PLAIN, r"its chat template fails \(no tool first\)"),
        (MESSAGES, "{{ ''.__class__.__mro__[1].__subclasses__() }}", "its chat template fails .*unsafe"),
        (MESSAGES, "{% if %}", "its chat template fails"),
        ([{"from": "human", "value": "hi"}], PLAIN, r"its message 1 has no role \(it has from, value\)"),
        (["hi"], PLAIN, r"its message 1 has no role \(it has str\)"),
        ({"role": "user"}, PLAIN, "its text is dict, not a string"),
        ([{"role": "assistant", "content": "\ud800"}], PLAIN, "its text is not Unicode"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_a_bad_record(messages, template, reason, config, read):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    data = config([good, {"messages": messages}], template, loss_on="assistant")
    with pytest.raises(BadRecordError, match=rf"record \d of .*chats\.jsonl: .*{reason}"):
        read(data, sequences=1)
    if template == PLAIN:
        skipped = read(data.model_copy(update={"bad_records": "skip"}), sequences=1)
        assert skipped[-1].stats.skipped == 1


def test_messages_need_a_template_and_the_right_field(config, read, tmp_path):
    data = config([{"messages": MESSAGES}])
    with pytest.raises(DataUsageError, match=r"tokenizer=byte has no chat template.*chat_template\.jinja"):
        read(data.model_copy(update={"tokenizer": "byte"}), sequences=1)
    with pytest.raises(BadRecordError, match=r"no field 'text' \(it has messages\): .*--data.text_field messages"):
        read(data.model_copy(update={"text_field": "text"}), sequences=1)
    with pytest.raises(BadRecordError, match=r"loss_on=assistant needs --data.text_field messages"):
        read(config([{"text": "plain"}], text_field="text", loss_on="assistant"), sequences=1)


def test_shards_keep_template_loss_and_special_tokens(config, read, tmp_path):
    data = config([{"messages": MESSAGES}, {"messages": MESSAGES[:3]}], loss_on="assistant")
    prepare(data, tmp_path / "out")
    settings = {name: getattr(data, name) for name in ("seq_len", "validation_fraction", "exhaustion", "shuffle")}
    shards = DataConfig(source="shards", path=str(tmp_path / "out"), tokenizer=str(tmp_path / "out"), **settings)
    (one,), (other,) = read(data, sequences=1), read(shards, sequences=1)
    assert np.array_equal(one.tokens, other.tokens)
    assert np.array_equal(one.targets, other.targets)
    assert load_tokenizer(shards.tokenizer).chat == load_tokenizer(data.tokenizer).chat, "for tercet generate --chat"
    with pytest.raises(DataUsageError, match=r"started with source\.loss_on=assistant, now no source\.loss_on"):
        prepare(data.model_copy(update={"loss_on": "all"}), tmp_path / "out")


def test_a_resumed_run_reads_the_same_conversations(config, assert_resumes):
    template = PLAIN.replace("{{ bos_token }}", "{{ strftime_now('%d %b %Y') }}")
    answers = [{"role": "assistant", "content": "x" * n} for n in range(40)]
    chats = [{"messages": [*MESSAGES[: n % 4], MESSAGES[1], answer]} for n, answer in enumerate(answers)]
    data = config(chats, template, loss_on="assistant", shuffle=True, shuffle_block=8, exhaustion="repeat", seq_len=64)
    batches = assert_resumes(data, 12, sequences=4, every=4)
    text, _ = text_and_learned(batches[0], data)
    assert text.startswith("26 Jul 2024<|im_start|>"), "whatever the day is"


def test_inspect_marks_what_is_masked(config, capsys):
    user = {"role": "user", "content": "what is <|im_end|>?"}
    data = config([{"messages": [user, MESSAGES[4]]}], loss_on="assistant")
    assert commands.inspect(data, sequences=1) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert r"masked  <s><|im_start|>user\nwhat is <|im_end|>?<|im_end|>\n<|im_start|>assistant\n" in lines
    assert r"learned six<|im_end|>\n<|endoftext|>" in lines
