"""An exported model in transformers has the same weights and generates the same tokens, without remote code."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

import tercet
import tercet.interop.huggingface  # registers
from inference.models import AS_M7C, language_model, trained
from tercet import cli
from tercet.config.data import DataConfig
from tercet.data.prepare import train_bpe
from tercet.data.tokenizers import LibraryTokenizer
from tercet.errors import TercetError
from tercet.interop.huggingface import TercetForCausalLM
from tercet.interop.huggingface.export import as_transformers_model, as_transformers_tokenizer, export
from tercet.parallel.activation_checkpointing import apply_activation_checkpointing

PROMPTS = [[5, 9, 200], list(range(1, 60)), [(37 * i * i + 11) % 251 + 1 for i in range(17)]]
BLOCK_SPARSE = {
    "model__gate": "none", "model__shared_kv": True, "model__branches": ["selected"], "model__compression": "mean"
}  # fmt: skip
KINDS = {"nsa": {}, "dense and window": {"model__attention": "dense,window"}, "as m7c": AS_M7C}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run") / "run", train__steps=2)


@pytest.fixture(scope="module")
def folder(run):
    return export(run, run.parent / "exported")


@pytest.fixture(params=KINDS, scope="module")
def model(request):
    return language_model(**KINDS[request.param])


@pytest.fixture(scope="module")
def theirs(model):
    made = as_transformers_model(model)
    made.generation_config.eos_token_id = None
    return made


def padded(prompts, side):
    width = max(map(len, prompts))
    rows = [[0] * (width - len(p)) + p if side == "left" else p + [0] * (width - len(p)) for p in prompts]
    masks = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    masks = masks if side == "left" else [mask[::-1] for mask in masks]
    return torch.tensor(rows), torch.tensor(masks)


def test_an_export_has_exactly_the_weights_of_the_run(run, folder):
    ours = tercet.load_model(run).state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is TercetForCausalLM
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == {f"model.{name}" for name in ours}
    for name, tensor in ours.items():
        assert torch.equal(loaded.state_dict()[f"model.{name}"], tensor)
        assert torch.equal(stored[f"model.{name}"], tensor)


def test_saving_a_loaded_export_gives_the_same_file(folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    again, before = (json.loads((p / "config.json").read_text()) for p in (tmp_path, folder))
    assert again == before


def test_an_export_runs_no_code_of_its_folder(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "modeling_tercet.py").write_text("1 / 0")
    assert AutoConfig.from_pretrained(copy).max_position_embeddings == 64
    assert type(AutoModelForCausalLM.from_pretrained(copy, trust_remote_code=True)) is TercetForCausalLM


def test_the_tokenizer_gives_the_same_tokens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    every = bytes(range(1, 128)).decode() + "".join(map(chr, range(128, 0x500))) + "日本 🙂 <|endoftext|> \x7f Ā\r\n"
    assert tokenizer(every)["input_ids"] == list(every.encode())
    assert tokenizer.decode(list(every.encode())) == every
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def test_a_trained_tokenizer_gives_the_same_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("some words and some other words\n" * 20)
    train_bpe(DataConfig(source="text", path=str(tmp_path)), tmp_path / "tokenizer.json", vocab_size=270)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    library.post_processor = TemplateProcessing(single="a $A", special_tokens=[("a", 0)])  # training does not use it
    ours = LibraryTokenizer(library, "with a first token")
    as_transformers_tokenizer(ours, 64).save_pretrained(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = " some other words, é\n"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs("<|endoftext|>")["input_ids"] == [ours.eos_id]  # a prompt may have special tokens
    assert theirs.eos_token_id == theirs.pad_token_id == ours.eos_id


def test_transformers_generates_the_same_tokens(model, theirs):
    expected = [g.tokens for g in tercet.generate(model, PROMPTS, max_new_tokens=12, temperature=0, eos_id=-1)]
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        for cache in (True, False):
            out = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, use_cache=cache)
            assert out[0, len(prompt) :].tolist() == tokens
    for side in ("left", "right"):
        ids, mask = padded(PROMPTS, side)
        out = theirs.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        assert out[:, ids.shape[1] :].tolist() == expected
    with pytest.raises(ValueError, match="pad on the left"):  # transformers counts the padding's positions
        theirs.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, use_cache=False)


def test_beams_are_the_same_with_and_without_cache(theirs):
    ids = torch.tensor(PROMPTS[2:])
    cached, plain = (
        theirs.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False, use_cache=c).tolist()
        for c in (True, False)
    )
    assert cached == plain


def test_a_cache_cannot_be_cropped_or_reset(theirs):
    with torch.no_grad():
        cache = theirs(torch.tensor([PROMPTS[2]]), use_cache=True).past_key_values
    assert (cache.get_seq_length(), len(cache)) == (17, 2)
    for change in (lambda: cache.crop(-1), cache.reset, lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(NotImplementedError, match="TercetCache"):
            change()


def test_only_the_logits_that_are_asked_for_are_returned(theirs):
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        (logits,) = theirs(ids, return_dict=False)
        # equal up to rounding: a BLAS may add in another order for fewer rows
        torch.testing.assert_close(theirs(ids, logits_to_keep=3).logits, logits[:, -3:])
        kept = theirs(ids, logits_to_keep=torch.tensor([2, 7])).logits
        torch.testing.assert_close(kept, logits[:, [2, 7]])


def test_the_loss_is_that_of_shifted_labels(model, theirs):
    ids = torch.tensor([PROMPTS[1]])
    targets = torch.tensor([PROMPTS[1][1:] + [-100]])
    ours = model(ids, None, targets)
    out = theirs(ids, labels=ids, logits_to_keep=0)
    torch.testing.assert_close(out.loss, ours.total / ours.tokens)
    out.loss.backward()
    assert all(p.grad is not None for p in theirs.parameters())
    theirs.zero_grad(set_to_none=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inputs_embeds": torch.zeros(1, 2, 16)}, "input_ids is missing"),
        ({"input_ids": torch.ones(1, 2).long(), "output_attentions": True}, "output_attentions"),
        ({"input_ids": torch.ones(1, 2).long(), "head_mask": torch.ones(1)}, "head_mask"),
        ({"input_ids": torch.ones(1, 4).long(), "position_ids": torch.tensor([[0, 1, 0, 1]])}, "cu_seqlens"),
        (
            {
                "input_ids": torch.ones(1, 4).long(),
                "attention_mask": torch.tensor([[0, 1, 1, 1]]),
                "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
            },
            "packing needs no padding",
        ),
    ],
)
def test_unsupported_arguments_are_refused(theirs, given, said):
    with pytest.raises(ValueError, match=said):
        theirs(**given)


GRADIENT_KINDS = {
    "nsa": {},
    "two-branch": {"model__branches": ["selected", "window"], "model__selector": "learned"},
    "block-sparse": BLOCK_SPARSE,
    "learned": {**BLOCK_SPARSE, "model__selector": "learned"},
    "dense, window": {"model__attention": "dense,window", "model__tie_embeddings": True},
}


@pytest.mark.parametrize("kind", GRADIENT_KINDS)
def test_use_cache_does_not_change_gradients(kind):
    ids, mask = padded([PROMPTS[1], PROMPTS[2] * 3], "left")
    labels = torch.where(mask.bool(), ids, -100)
    for mode in ("none", "full"):
        model = as_transformers_model(language_model(**GRADIENT_KINDS[kind]))
        apply_activation_checkpointing(model.model.blocks, mode)
        for training in (False, True):
            model.train(training)
            found = []
            for cache in (False, True):
                model.zero_grad()
                out = model(ids, attention_mask=mask, labels=labels, use_cache=cache)
                out.loss.backward()
                found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            assert found[0].keys() == found[1].keys()
            assert len(found[0]) >= sum("selector" not in name for name, _ in model.named_parameters())
            torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        # the cache is filled nevertheless, and what is read from it has no gradients
        new = model(ids[:, -1:], past_key_values=out.past_key_values)
        torch.testing.assert_close(new.logits, model(*_repeat_last(ids, mask)).logits[:, -1:], rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match=r"past_key_values .* no gradients.*without past_key_values"):
            new.logits.sum().backward()


def _repeat_last(ids, mask):
    return torch.cat((ids, ids[:, -1:]), 1), torch.cat((mask, mask[:, -1:]), 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_are_read_whole_and_in_chunks(model, theirs, side):
    ids, mask = padded(PROMPTS, side)
    more = (20, 0, 0, 1) if side == "left" else (0, 0, 0, 1)  # a row of padding, and a first chunk
    ids, mask = F.pad(ids, more), F.pad(mask, more)
    width = ids.shape[1]
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask).logits
        for row, prompt in enumerate(PROMPTS):
            alone = model(torch.tensor([prompt]))[0]
            torch.testing.assert_close(expected[row][mask[row].bool()], alone, rtol=1e-4, atol=1e-4)
        for given in (mask.bool(), mask.float()):
            assert torch.equal(theirs(ids, attention_mask=given).logits, expected)
        for longer in (False, True):
            past, parts = None, []
            for start, stop in ((0, 20), (20, 21), (21, 50), (50, width)):
                given = F.pad(mask, (0, 9)) if longer else mask[:, :stop]
                out = theirs(ids[:, start:stop], attention_mask=given, past_key_values=past, use_cache=True)
                past = out.past_key_values
                parts.append(out.logits)
            found, real = torch.cat(parts, 1), mask.bool()
            assert found.isfinite().all()
            torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(1, 4), r"\[1, 4\] .*does not fit .*\[1, 6\], 0 for padding"),
        (torch.ones(1, 8), r"\[1, 8\] .*does not fit"),
        (torch.ones(1, 6, 6), r"\[1, 6, 6\] .*does not fit"),
        (torch.tensor([[0, 0, 0, 0, -torch.inf, -torch.inf]]), "0 for padding and 1"),
        (torch.tensor([[1, 1, 2, 2, 3, 3]]), "0 for padding and 1"),
        (torch.zeros(1, 6), r"\[1, 6\] of float32 .*0 everywhere"),
        (torch.zeros(1, 1, 6, 6), "does not fit"),
    ],
)
def test_other_masks_are_refused(theirs, mask, said):
    with pytest.raises(TercetError, match=said) as error:
        theirs(torch.ones(1, 6).long(), attention_mask=mask)
    assert "\n" not in str(error.value)


def test_a_cache_goes_on_with_its_own_padding_and_positions(theirs):
    ids, mask = padded(PROMPTS, "left")
    cut, places = ids.shape[1] - 1, (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask, position_ids=places).logits[:, -1:]
        for given in (
            {}, {"attention_mask": mask}, {"attention_mask": mask, "position_ids": places[:, -1:]},
            {"position_ids": torch.tensor([[cut]])},
        ):  # fmt: skip
            past = theirs(ids[:, :cut], attention_mask=mask[:, :cut], use_cache=True).past_key_values
            logits = theirs(ids[:, cut:], past_key_values=past, **given).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        for given, said in (
            ({"attention_mask": torch.ones_like(mask)}, "other padding among its first 58 tokens than the cache"),
            ({"attention_mask": mask[:, cut:]}, "does not fit"),
            ({"position_ids": torch.tensor([[7]])}, "position_ids"),
        ):
            past = theirs(ids[:, :cut], attention_mask=mask[:, :cut], use_cache=True).past_key_values
            with pytest.raises((TercetError, ValueError), match=said):
                theirs(ids[:, cut:], past_key_values=past, **given)
        with pytest.raises(ValueError, match=r"DynamicCache.*TercetCache"):
            theirs(ids, past_key_values=DynamicCache())


def test_trainer_trains_it_and_saves_a_loadable_checkpoint(folder, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = [{"input_ids": (torch.arange(48) + i) % 40 + 60} for i in range(8)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True, save_steps=6,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert trainer.evaluate()["eval_loss"] < losses[0]


def without_a_tensor(file):
    tensors = load_file(file)
    tensors.pop("model.norm.weight")
    save_file(tensors, file, {"format": "pt"})


def another_size(file):
    config = file.with_name("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 32}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.unlink(), "no file named model.safetensors"),
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "incomplete metadata"),
        (without_a_tensor, "missing keys.*model.norm.weight"),
        (another_size, "hidden_size=32.*tercet.dim=16"),
    ],
)
def test_a_damaged_folder_is_refused(folder, tmp_path, damage, said):
    copy = shutil.copytree(folder, tmp_path / "copy")
    damage(copy / "model.safetensors")
    with pytest.raises((TercetError, ValueError, OSError, SafetensorError), match=said) as caught:
        AutoModelForCausalLM.from_pretrained(copy)
    assert "\n" not in str(caught.value)


def test_a_failed_export_leaves_nothing_behind(run, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TercetForCausalLM, "save_pretrained", full)
    with pytest.raises(TercetError, match="No space left on device"):
        export(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_command_names_the_checkpoint_that_it_exports(tmp_path, capsys):
    run = trained(tmp_path / "run", train__steps=2, checkpoint__every=1)
    older, newest = sorted((run / "checkpoints").glob("step-*"))
    next(newest.glob("*.safetensors")).write_bytes(b"")  # damaged: the one before it is exported
    assert cli.main(["export", "hf", str(run), str(tmp_path / "out")]) == 0
    assert f"exporting {older}\n" in capsys.readouterr().out


def test_a_non_empty_folder_is_not_overwritten(run, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(TercetError, match="not empty"):
        export(run, tmp_path)
