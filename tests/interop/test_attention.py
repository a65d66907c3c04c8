"""attn_implementation="tercet": dense models of transformers run and train block-sparse."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)

import tercet
from interop.test_import import SIZES, dense_model
from tercet.interop.huggingface import use_block_sparse
from tercet.interop.huggingface.attention import layer_attention, layout_mask
from tercet.interop.huggingface.export import export
from tercet.interop.huggingface.import_hf import import_model
from tercet.interop.huggingface.support import UnsupportedError

FAMILIES = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}
# 3 blocks of 8: queries from position 24 on have to choose
NSA = tercet.NSAConfig(compress_block=4, compress_stride=2, select_block=8, select_count=3)
ERROR = {"rtol": 1e-5, "atol": 1e-5}  # transformers' norms and RoPE are in float32, even of float64 models


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return dense_model(tmp_path_factory.mktemp("llama"), FAMILIES["llama"]).double()


@pytest.fixture
def sparse(llama):
    use_block_sparse(llama, NSA)
    return llama


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(1, 99, shape, generator=torch.Generator().manual_seed(len(shape)))


def run(model, tokens: Tensor, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients."""
    model.zero_grad()
    out = model(tokens, labels=options.pop("labels", tokens), **options)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_below_dense_below_logits_and_gradients_are_the_dense_models(family: str, tmp_path):
    model, tokens = dense_model(tmp_path, FAMILIES[family]).double(), some_tokens(2, 50)
    model.set_attn_implementation("sdpa")
    dense = run(model, tokens)
    use_block_sparse(model, NSA, dense_below=50)
    torch.testing.assert_close(run(model, tokens), dense, **ERROR)
    use_block_sparse(model, NSA)
    logits, _ = run(model, tokens)
    torch.testing.assert_close(logits[:, :24], dense[0][:, :24], **ERROR)
    assert not torch.allclose(logits[:, 24:], dense[0][:, 24:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_exported_model_computes_what_it_computed_in_tercet(family: str, tmp_path):
    dense_model(tmp_path / "dense", FAMILIES[family])
    import_model(tmp_path / "dense", tmp_path / "ours", attention="block-sparse*2,dense", nsa=NSA, dense_below=30)
    export(tmp_path / "ours", tmp_path / "back", family)
    ours, tokens = tercet.load_model(tmp_path / "ours"), some_tokens(2, 90)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="tercet")
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-3, atol=1e-4)
        theirs.set_attn_implementation("sdpa")
        assert not torch.allclose(theirs(tokens).logits, ours(tokens), rtol=1e-2, atol=1e-2)


def test_settings_are_saved_with_the_model(sparse, tmp_path):
    use_block_sparse(sparse, replace(NSA, select_count=4), dense_below=35, exact_groups=[[1], [], [0]])
    sparse.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="tercet")
    assert again.config.tercet == sparse.config.tercet
    assert again.config.tercet["dense_below"] == 35
    tokens = some_tokens(1, 60)
    assert torch.equal(again(tokens).logits, sparse(tokens).logits)
    import_model(tmp_path, tmp_path / "ours")
    ours = tercet.load_model(tmp_path / "ours")
    assert ours.config.exact_groups == ((1,), (), (0,))
    torch.testing.assert_close(ours(tokens), again(tokens).logits.float(), rtol=1e-3, atol=1e-4)
    use_block_sparse(again, NSA, layers=[0, 2], score_channels=8, exact_groups=[[1], [], [0]])
    again.save_pretrained(tmp_path / "layers")
    imported = import_model(tmp_path / "layers", tmp_path / "imported").run.model
    assert (imported.attention, imported.exact_groups) == (("nsa", "dense", "nsa"), ((1,), (), (0,)))


@pytest.mark.parametrize(("rows", "dense_below"), [(1, 33), (2, 0)])
def test_packed_documents_equal_documents_one_by_one(sparse, rows: int, dense_below: int):
    use_block_sparse(sparse, NSA, dense_below=dense_below)
    documents = [some_tokens(n) for n in (50, 7, 39, 96)]
    expected = torch.cat([sparse(document[None]).logits[0] for document in documents])
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=rows == 1)([{"input_ids": d} for d in documents])
    for name in ("input_ids", "position_ids", "labels"):
        packed[name] = packed[name].view(rows, -1)
    logits, gradients = run(sparse, packed.pop("input_ids"), **packed)
    torch.testing.assert_close(logits.flatten(0, 1), expected, **ERROR)
    sparse.zero_grad()
    targets = sum(len(document) - 1 for document in documents)
    for document in documents:
        loss = sparse(document[None], labels=document[None]).loss * ((len(document) - 1) / targets)
        loss.backward()
    torch.testing.assert_close({n: p.grad for n, p in sparse.named_parameters()}, gradients, **ERROR)


@pytest.mark.parametrize(("side", "given_positions"), [("left", True), ("left", False), ("right", False)])
def test_padding_changes_nothing(sparse, side: str, given_positions: bool):
    tokens, lengths = some_tokens(3, 70), (70, 41, 9)
    mask = torch.stack([torch.arange(70) < n for n in lengths]).long()
    if side == "left":
        mask = mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0) if given_positions else None
    labels = torch.where(mask.bool(), tokens, -100)
    logits, gradients = run(sparse, tokens, attention_mask=mask, position_ids=positions, labels=labels)
    for row, real in enumerate(mask.bool()):
        torch.testing.assert_close(logits[row][real], sparse(tokens[row][real][None]).logits[0], **ERROR)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_cu_seq_lens_q_means_what_positions_that_restart_mean(sparse):
    tokens, bounds = some_tokens(1, 80), torch.tensor([0, 50, 80], dtype=torch.int32)
    positions = torch.cat((torch.arange(50), torch.arange(30)))[None]
    with torch.no_grad():
        expected = sparse(tokens, use_cache=False, position_ids=positions).logits
        for given in ({}, {"position_ids": positions}):  # a shift of a document's positions changes nothing
            found = sparse(tokens, use_cache=False, cu_seq_lens_q=bounds, **given).logits
            torch.testing.assert_close(found, expected, **ERROR)
    for rows, given in ((2, {}), (1, {"attention_mask": (torch.arange(80) > 3)[None].long()})):
        with pytest.raises(UnsupportedError, match=r"cu_seq_lens_q .*drop them"):
            sparse(tokens.expand(rows, -1), use_cache=False, cu_seq_lens_q=bounds, **given)


def test_a_batch_of_nothing_but_padding_is_finite(sparse):
    logits, gradients = run(sparse, some_tokens(2, 20), attention_mask=torch.zeros(2, 20, dtype=torch.long))
    assert all(x.isfinite().all() for x in (logits, *gradients.values()))


@pytest.mark.parametrize("options", [{}, {"dense_below": 40}, {"exact_groups": [[0], [], [0, 1]]}])
@pytest.mark.parametrize(("padded", "given_positions"), [(False, False), (True, False), (True, True)])
def test_tokens_after_a_cache_equal_whole_sequences(sparse, options: dict, padded: bool, given_positions: bool):
    use_block_sparse(sparse, NSA, **options)
    tokens, mask = some_tokens(2, 80), torch.ones(2, 80, dtype=torch.long)
    if padded:
        mask[1, :17] = 0  # longer than the first chunk
        mask[0, 20:23] = 0  # as when a right-padded prompt goes on
    # as `generate` passes them: 1 for padding
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1) if given_positions else None
    whole = sparse(tokens, attention_mask=mask, position_ids=positions).logits
    cache, parts, at = DynamicCache(), [], 0
    for width in (13, 12, 1, 20, 1, 1, 32):
        part = slice(at, at + width)
        seen = mask[:, : part.stop] if padded else None
        own = None if positions is None else positions[:, part]
        out = sparse(tokens[:, part], attention_mask=seen, position_ids=own, past_key_values=cache)
        parts.append(out.logits)
        at += width
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], **ERROR)


@pytest.mark.parametrize("seed", range(24))
def test_masks_mean_what_they_mean_to_sdpa(llama, seed: int):
    rng = random.Random(seed)
    batch, width, room = rng.randint(1, 3), rng.randint(2, 40), 48
    tokens, real = some_tokens(batch, width), torch.ones(batch, width, dtype=torch.bool)
    for row in real:
        left, right = rng.choice([(0, 0), (0.5, 0), (0, 0.5), (0.3, 0.3), (1, 0)])
        row[: int(left * rng.random() * width + left // 1 * width)] = False
        row[width - int(right * rng.random() * width) :] = False
        if rng.random() < 0.2:
            row[rng.randrange(width)] = False
    kind = rng.choice(["int64", "bool", "float32", "longer", "none"])
    if kind == "none":
        real[:] = True
    whole = F.pad(real, (0, 8)).long() if kind == "longer" else real
    whole = whole.to(getattr(torch, kind)) if kind not in ("longer", "none") else whole
    cache = rng.choice(["dynamic", "static", *["whole"] * (kind != "longer")])
    cuts = sorted({0, width, *(rng.sample(range(width), rng.randint(0, min(3, width))) if cache != "whole" else ())})
    positions = (real.cumsum(1) - 1).masked_fill(~real, 1) if rng.random() < 0.5 else None

    def logits() -> Tensor:
        past = {"whole": None, "dynamic": DynamicCache(), "static": StaticCache(llama.config, room)}[cache]
        parts = []
        for start, stop in itertools.pairwise(cuts):
            mask = None
            if kind != "none":
                mask = whole if kind == "longer" else whole[:, :stop]
            own = None if positions is None else positions[:, start:stop]
            out = llama(
                tokens[:, start:stop], attention_mask=mask, position_ids=own, past_key_values=past,
                use_cache=past is not None,
            )  # fmt: skip
            parts.append(out.logits)
        return torch.cat(parts, 1)

    with torch.no_grad():
        llama.set_attn_implementation("sdpa")
        expected = logits()
        use_block_sparse(llama, replace(NSA, select_count=6), dense_below=rng.choice([0, 20, 48]))
        found = logits()
    assert found.isfinite().all()
    torch.testing.assert_close(found[real], expected[real], **ERROR)


def test_generate_greedily_with_beams_in_chunks_assisted_and_with_left_padding(sparse):
    prompts, options = some_tokens(2, 40), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 3):
        cached = sparse.generate(prompts, num_beams=beams, **options)
        assert torch.equal(cached, sparse.generate(prompts, num_beams=beams, use_cache=False, **options))
    alone = sparse.generate(prompts[:1], **options)
    for way in ({"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(sparse.generate(prompts[:1], **way, **options), alone)
    mask = torch.ones_like(prompts)
    mask[0, :15] = 0
    expected = sparse.generate(prompts[:1, 15:], **options)
    for way in ({}, {"cache_implementation": "static"}, {"prefill_chunk_size": 9}):
        padded = sparse.generate(prompts, attention_mask=mask, **way, **options)
        assert torch.equal(padded[:1, 15:], expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(sparse, reentrant: bool):
    tokens, positions = some_tokens(1, 80), torch.cat((torch.arange(50), torch.arange(30)))[None]
    expected = run(sparse, tokens, position_ids=positions)
    sparse.train()
    sparse.gradient_checkpointing_enable({"use_reentrant": reentrant})
    sparse.enable_input_require_grads()
    try:
        torch.testing.assert_close(run(sparse, tokens, position_ids=positions), expected, **ERROR)
    finally:
        sparse.disable_input_require_grads()
        sparse.gradient_checkpointing_disable()
        sparse.eval()


def test_adapters_trained_by_the_trainer_are_those_of_sdpa_where_every_block_is_chosen(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in some_tokens(8, 24)]
    adapters = {}
    for name in ("sdpa", "tercet"):
        model = dense_model(tmp_path / name, FAMILIES["qwen3"])
        if name == "tercet":
            use_block_sparse(model, NSA)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        options = TrainingArguments(
            str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=True, gradient_checkpointing=True,
        )  # fmt: skip
        Trainer(model, options, train_dataset=data).train()
        adapters[name] = peft.get_peft_model_state_dict(model)
    assert any(x.any() for key, x in adapters["sdpa"].items() if "lora_B" in key)
    torch.testing.assert_close(adapters["tercet"], adapters["sdpa"], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_compiled_model_computes_the_same(sparse):
    tokens, options = some_tokens(1, 80), {"position_ids": torch.arange(80)[None] % 50, "use_cache": False}
    compiled = torch.compile(sparse, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens, **options).logits, sparse(tokens, **options).logits, **ERROR)


def test_autocast_computes_attention_in_bfloat16(tmp_path):
    model, tokens = dense_model(tmp_path, FAMILIES["qwen3"]), some_tokens(1, 24)
    dense = model(tokens).logits
    use_block_sparse(model, NSA)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens, labels=tokens, use_cache=False)  # a cache would make all float32
        out.loss.backward()
    torch.testing.assert_close(out.logits.float(), dense, rtol=0.1, atol=0.2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nsa": {"select_count": 1}}, "tercet.nsa: .*select_count=1"),
        ({"selector": "learned"}, "tercet.selector='learned' .*use_block_sparse"),
        ({"gate": "sigmoid"}, "tercet.attention='nsa' .*gate=none"),
        ({"attention": "window"}, "tercet.attention='window'"),
        ({"exact_groups": [[0], [1]]}, "exact_groups names 2 layers but layers=3"),
        ({"exact_groups": [[0], [1], [2]]}, "layer 2: exact_groups=2: expected of the KV heads 0 … 1"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(sparse, settings: dict[str, object], words: str):
    sparse.config.tercet = {**sparse.config.tercet, **settings}
    with pytest.raises(UnsupportedError, match=words):
        sparse(some_tokens(1, 8))


def test_arguments_that_cannot_be_used_are_refused(sparse):
    tokens, restart = some_tokens(1, 30), torch.arange(30)[None] % 20
    for options, words in (
        ({"output_attentions": True}, "output_attentions=True .*use eager"),
        ({"attention_mask": torch.ones(1, 1, 30, 30)}, r"attention_mask \[1, 1, 30, 30\] .*pass one \[batch, tokens\]"),
        ({"attention_mask": torch.ones(2, 30)}, r"\[2, 30\] .*does not fit .*\[1, 30\]"),
        ({"attention_mask": torch.ones(1, 20)}, r"\[1, 20\] .*does not fit .*\[1, 30\]"),
        ({"attention_mask": torch.ones(1, 40)}, "has 40 tokens, the input 30"),
        ({"softcap": 30.0}, "softcap .*soft-capping"),
        ({"s_aux": torch.zeros(4)}, "s_aux .*attention sinks"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            sparse(tokens, use_cache=False, **options)
    cache = sparse(tokens, position_ids=restart, use_cache=True).past_key_values
    with pytest.raises(UnsupportedError, match=r"position_ids 10 .* 30 tokens.*use_cache=False"):
        sparse(tokens[:, :1], position_ids=torch.tensor([[10]]), past_key_values=cache)
    q, layout = torch.zeros(1, 4, 8, 16), layout_mask(batch_size=1, kv_length=8, q_length=8, config=sparse.config)
    with pytest.raises(UnsupportedError, match=r"attention_dropout=0\.1"):
        layer_attention(sparse.model.layers[0].self_attn, q, q, q, layout, dropout=0.1)
