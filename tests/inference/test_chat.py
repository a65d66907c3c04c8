"""`tercet generate --chat`: the tokens of a prompt are those of transformers, and the end of a turn ends an answer."""

from __future__ import annotations

import io
import json

import pytest

import tercet
from inference.models import language_model
from tercet.cli import main
from tercet.inference.arguments import PromptError, tokenize_prompts

TEMPLATE = (
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tool first') }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2? 🎉"}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that loads as a small model with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    library = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    tokenizer = str(tmp_path / "tokenizer.json")
    (tmp_path / "config.toml").write_text(f'[model]\nvocab_size = 320\n[data]\ntokenizer = "{tokenizer}"\n')
    model = language_model(model__vocab_size=320, data__tokenizer=tokenizer, data__seq_len=256, train__micro_batch=1)
    monkeypatch.setattr("tercet.inference.load.load_model", lambda *_, **__: model)
    return tmp_path


@pytest.fixture
def model(folder):
    from tercet.inference.load import load_model

    return load_model(folder)


def test_a_conversation_has_the_tokens_of_transformers(folder, model):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    answer = tercet.generate(model, ASKED, max_new_tokens=3)
    assert answer.prompt == theirs.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
    (text,) = tokenize_prompts(["<|im_start|>hi<|im_end|>"], model.tokenizer, 320)
    assert text == theirs("<|im_start|>hi<|im_end|>", add_special_tokens=False).input_ids
    assert len(text) == 4


def test_the_end_of_a_turn_and_eos_end_an_answer(model):
    tokenizer = model.tokenizer
    assert tokenizer.turn_end == tokenizer.encode("<|im_end|>", specials=True)[0]
    free = tercet.generate(model, ASKED, max_new_tokens=12, temperature=0, eos_id=-1).tokens
    for end in ("turn_end", "eos_id"):
        setattr(tokenizer, end, free[5])
        assert tercet.generate(model, ASKED, max_new_tokens=12, temperature=0).tokens == free[: free.index(free[5])]
        assert tercet.generate(model, [ASKED], max_new_tokens=12, temperature=0)[0].finished == "eos"
        setattr(tokenizer, end, -1)
    text = tercet.generate(model, "plain", max_new_tokens=12, temperature=0, eos_id=-1).tokens
    tokenizer.turn_end = text[0]
    assert tercet.generate(model, "plain", max_new_tokens=1, temperature=0).tokens == text[:1], "not of a conversation"


def test_the_command_prints_answers_only(folder, model, monkeypatch, capsys):
    words = ["generate", str(folder), "--chat", "--max-new-tokens", "4", "--temperature", "0"]
    assert main([*words, "--system", "Be brief.", "--prompt", "2+2? 🎉"]) == 0
    wanted = tercet.generate(model, ASKED, max_new_tokens=4, temperature=0).text
    assert capsys.readouterr().out == wanted + "\n"
    assert main([*words, "--system", "Be brief.", "--prompt", "2+2? 🎉", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == wanted

    seen = []
    monkeypatch.setattr("tercet.inference.arguments._render", lambda messages, *_: seen.append(messages) or "x")
    lines = iter(["one", "two"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or (_ for _ in ()).throw(EOFError))
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(words) == 0
    assert [message["role"] for message in seen[-1]] == ["user", "assistant", "user"], "it remembers what was said"


def test_what_cannot_be_rendered_is_an_error(folder, model, capsys):
    with pytest.raises(PromptError, match=r"the prompt cannot be rendered: its chat template fails \(no tool first\)"):
        tercet.generate(model, [{"role": "tool", "content": ""}])
    assert main(["generate", str(folder), "--system", "x", "--prompt", "y"]) == 2
    assert "--system is used with --chat only" in capsys.readouterr().err
    (folder / "tokenizer_config.json").unlink()
    assert main(["generate", str(folder), "--chat", "--prompt", "y"]) == 2
    assert "has no chat template: put tokenizer_config.json" in capsys.readouterr().err
