"""Import and export give an instruct model's tokenizer, chat template and end of turn back as they were."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import tercet
from tercet.config.load import load
from tercet.errors import TercetError
from tercet.interop.huggingface import TercetConfig
from tercet.interop.huggingface.export import export
from tercet.interop.huggingface.import_hf import import_model
from tercet.train.trainer import train

SPECIALS = ("<unk>", "<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
UNK, BOS, EOS, START, END_OF_TURN, PAD = range(6)
TEXT = "She said: don't stop. Numbers 1, 22 and 333; ÄÖÜ é ß naïve. " * 3
STRINGS = [
    TEXT,
    "",
    " ",
    "  leading, trailing   ",
    "a" + " " * 40 + "b\t\t\n\n\n  c",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪",
    "العربية من اليمين إلى اليسار",
    "עברית \u200f(rtl)\u200e ltr",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|im_end|>b <|endoftext|> c<s></s> <pad>",
    "<|im_startx|> < |im_end|> <|IM_END|>",
    "日本語テキスト、中文 한국어",
    "e\u0301 é ﬁ ＦＵＬＬ Å İ ı ẞ",
    "\u200bzero\u200dwidth\ufeff",
    "def f(x):\r\n\treturn x ** 2  # π\r\n",
    "12345678901234567890 3.14e-10",
    "\x00\x01\x7f",
    "नमस्ते ไทย ភាសា",
    "▁metaspace ▁ Ġbyte",
    "w" * 300,
    "[INST] <<SYS>> &lt;b&gt; [/INST]",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "hi 🙂 <|im_end|>"}, {"role": "assistant", "content": "yes"}]
KINDS = ("byte level", "metaspace", "normalizer")


def instruct_tokenizer(kind):
    library = Tokenizer(models.BPE(unk_token="<unk>" if kind != "byte level" else None, byte_fallback=kind != KINDS[0]))
    if kind == "metaspace":  # as Llama's: text starts with a space, unknown characters become bytes
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        parts = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
        library.decoder = decoders.Sequence([*parts])
    else:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    if kind == "normalizer":
        library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind != "metaspace" else []
    added = [AddedToken(name, special=True, normalized=False) for name in SPECIALS]
    if kind == "metaspace":
        added += [AddedToken(f"<0x{byte:02X}>") for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=added, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([TEXT], trainer)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return library


def instruct_model(folder, kind):
    library, names = instruct_tokenizer(kind), dict(zip(("unk", "bos", "eos", "_", "_", "pad"), SPECIALS, strict=True))
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, vocab_size=library.get_vocab_size(), max_position_embeddings=8192,
                         bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    library.enable_truncation(1000)
    library.save(str(folder / "tokenizer.json"))
    settings = {f"{name}_token": token for name, token in names.items() if name != "_"}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8000, "padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    generation = {"bos_token_id": BOS, "eos_token_id": [END_OF_TURN, EOS], "pad_token_id": PAD, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def source(request, tmp_path_factory):
    return instruct_model(tmp_path_factory.mktemp("source"), request.param)


@pytest.fixture(scope="module")
def imported(source):
    return import_model(source, source.parent / f"{source.name}-imported", attention="dense").folder


@pytest.fixture(scope="module")
def exported(imported):
    return export(imported, imported.parent / f"{imported.name}-exported")


def same_tokens(folder, source):
    theirs, before = (AutoTokenizer.from_pretrained(place) for place in (folder, source))
    for text in STRINGS:
        for added in (True, False):
            ids = before(text, add_special_tokens=added)["input_ids"]
            assert theirs(text, add_special_tokens=added)["input_ids"] == ids
            assert theirs.decode(ids) == before.decode(ids)
    assert START in theirs(STRINGS[8])["input_ids"]
    assert theirs.apply_chat_template(CHAT, return_dict=False) == before.apply_chat_template(CHAT, return_dict=False)
    for name in ("chat_template", "bos_token", "eos_token", "unk_token", "pad_token", "model_max_length"):
        assert getattr(theirs, name) == getattr(before, name), name


def test_an_export_has_the_tokenizer_and_the_token_ids_of_the_source(source, imported, exported):
    family = export(imported, imported.parent / f"{imported.name}-llama", "llama")
    config = json.loads((source / "config.json").read_text())
    for folder in (exported, family):
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (folder / name).read_bytes() == (source / name).read_bytes()
        same_tokens(folder, source)
        made = json.loads((folder / "config.json").read_text())
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"):
            assert made[key] == config[key]
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation == json.loads((source / "generation_config.json").read_text())
    ours = tercet.load_model(exported)  # an export is read like an import
    assert ours.tokenizer.fingerprint == tercet.load_model(imported).tokenizer.fingerprint


def test_an_export_stops_at_the_end_of_turn_of_the_source(exported):
    model, prompt = AutoModelForCausalLM.from_pretrained(exported), torch.tensor([[BOS, 7, 8, 9]])

    def end_after_3(ids, scores):
        wanted = END_OF_TURN if ids.shape[1] == 7 else 7
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([wanted]), 0.0)

    out = model.generate(prompt, max_new_tokens=20, do_sample=False, logits_processor=[end_after_3])
    assert out[0, 4:].tolist() == [7, 7, 7, END_OF_TURN]


def test_damaged_settings_are_one_line(imported, tmp_path):
    for content in (b"{bad", b"[1]", b"\xff"):
        damaged = shutil.copytree(imported, tmp_path / content.hex())
        (damaged / "generation_config.json").write_bytes(content)
        with pytest.raises(TercetError, match=r"generation_config\.json"):
            export(damaged, tmp_path / "out")


def test_a_run_carries_the_files_on(tmp_path):
    source = instruct_model(tmp_path, KINDS[0])
    import_model(source, tmp_path / "in", attention="dense", seq_len=64)
    flags = {"run.dir": str(tmp_path / "run"), "train.steps": 1, "train.tokens_per_step": 64, "train.micro_batch": 1,
             "train.val_tokens": 0, "data.source": "text", "data.path": str(source / "config.json"),
             "log.tensorboard": False, "run.threads": 1, "train.sample_tokens": 0, "train.warmup_steps": 0,
             "data.validation_fraction": 0, "checkpoint.async_save": False}  # fmt: skip
    assert train(load(file=tmp_path / "in" / "config.toml", flags=flags).config) == 0
    same_tokens(export(tmp_path / "run" / "checkpoints" / "step-00000001", tmp_path / "out"), source)
    assert (tmp_path / "run" / "chat_template.jinja").read_text() == TEMPLATE
    assert AutoConfig.from_pretrained(tmp_path / "out").max_position_embeddings == 8192


def test_without_tercet_transformers_says_what_the_folder_needs(exported, monkeypatch):
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "tercet")  # as if it had not been imported
    with pytest.raises(ValueError, match="custom code"):
        AutoConfig.from_pretrained(exported, trust_remote_code=False)
    assert type(AutoConfig.from_pretrained(exported, trust_remote_code=True)) is TercetConfig
    assert "import tercet.interop.huggingface" in (exported / "modeling_tercet.py").read_text()
