"""Recorded selections: what a model selected comes back from a small file, and the operator is timed with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tercet
from inference.models import language_model
from tercet.bench import attention
from tercet.cli import main
from tercet.config.load import write_config
from tercet.errors import UsageError
from tercet.inference.perplexity import held_out
from tercet.inference.recorded_selections import check_fits, load, make_recording, record, save
from tercet.inference.selection_map import LayerSelection, record_selections

NSA = tercet.NSAConfig(compress_block=4, compress_stride=4, select_block=8, select_count=5, window=8)
OPTIONS = attention.Options(correlation=0.9, dense=(), dense_limit=0, rows=4, budget=0.0, graph=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers and two KV heads."""
    folder = tmp_path_factory.mktemp("run")
    model = language_model(model__layers=4, model__heads=4, model__kv_heads=2)
    write_config(model.run, {}, folder)
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


def test_a_recording_holds_what_evenly_spaced_layers_selected(run: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "new" / "selections.npz"
    assert main(["eval", "selections", str(run), str(file), "--length", "100", "--layers", "2"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["layers"], told["length"], told["bytes"]) == ([0, 3], 100, file.stat().st_size)
    model = language_model(model__layers=4, model__heads=4, model__kv_heads=2)
    (batch,) = held_out(model, sequences=1, seq_len=100)
    selected = record_selections(model, batch.tokens[0].tolist())
    recording = load(file)
    for place, layer in enumerate(recording.layers):
        assert torch.equal(recording.block_indices(place, 100, 2)[0], selected[layer].blocks)
        # causal: a shorter sequence selects the same; more heads and sequences repeat the recorded ones
        wide = recording.block_indices(place, 37, 3, batch=2)
        heads = selected[layer].blocks[:37].unbind(1)
        assert torch.equal(wide, torch.stack([heads[i % 2] for i in range(6)]).view(2, 3, 37, -1).transpose(1, 2))


def test_fewer_kv_heads_can_be_recorded_but_not_more(run: Path, tmp_path: Path, capsys) -> None:
    command = ["eval", "selections", str(run), str(tmp_path / "s.npz")]  # of the length it was trained with
    assert main([*command, "--kv-heads", "1"]) == 0
    assert load(tmp_path / "s.npz").bits.shape[:2] == (4, 1)
    assert load(tmp_path / "s.npz").tokens == 128
    (tmp_path / "s.npz").unlink()
    for flag, most in (("--kv-heads", 2), ("--layers", 4)):
        assert main([*command, flag, "5"]) == 2
        assert f"{flag} 5 is more than the {most}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("packing", "cross"), [("continue", False), ("continue", True), ("whole", False)])
def test_padding_is_not_recorded_as_text(tmp_path: Path, packing: str, cross: bool) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({"text": f"{i:039}"}) + "\n" for i in range(8)))  # 40 tokens with EOS
    model = language_model(
        data__source="jsonl", data__path=str(file), data__validation_fraction=0.5, data__packing=packing,
        data__cross_document_attention=cross,
    )  # fmt: skip
    most = 40 * len(list(held_out(model, sequences=8, seq_len=40)))
    assert record(model, most).tokens == most > 40
    with pytest.raises(UsageError, match=f"--length {most + 1} is more than .* {most} tokens"):
        record(model, most + 1)
    if packing == "whole":  # one document and padding in each sequence
        with pytest.raises(UsageError, match=r"--length 60 is more than .* 40 tokens"):
            record(model, 60)


def recorded_text(tokens: int, file: Path, layers: int = 1, config: tercet.NSAConfig = NSA) -> None:
    """Write selections of one KV head whose neighbours share most of their blocks."""
    found = []
    for layer in range(layers):
        noise = torch.randn(1, tokens, 1, config.num_blocks(tokens), generator=torch.Generator().manual_seed(layer))
        blocks = tercet.select_blocks(attention.smooth(noise, 0.98), config=config)
        found.append(LayerSelection(layer, config, blocks[0], torch.empty(0)))
    save(make_recording("smooth", found), file)


def test_the_operator_is_timed_with_recorded_blocks_and_its_own_choice(tmp_path: Path, monkeypatch) -> None:
    recorded_text(200, tmp_path / "s.npz", layers=2)
    monkeypatch.setitem(attention.SHAPES, "toy", attention.Shape(1, 150, 2, 2, 16))
    chosen, read = [], []
    choice_pass, operator = attention.choice_pass, attention.nsa_attention

    def choose(x, config):
        run = choice_pass(x, config)
        return lambda: chosen.append(run())

    def watched(*tensors, block_indices=None, **options):
        read.append((len(chosen), block_indices))
        return operator(*tensors, block_indices=block_indices, **options)

    monkeypatch.setattr(attention, "choice_pass", choose)
    monkeypatch.setattr(attention, "nsa_attention", watched)
    row = attention.bench("toy", f"recorded:{tmp_path / 's.npz'}", NSA, OPTIONS)
    assert (row["shape"], row["inputs"], row["correct"]) == ("toy", "recorded", True)
    recording = load(tmp_path / "s.npz")
    layers = [recording.block_indices(i, 150, 2) for i in range(2)]
    assert [layer["agreement"] for layer in row["layers"]] == [attention.agreement(blocks) for blocks in layers]
    assert row["nsa_both_ms"] == sum(layer["nsa_both_ms"] for layer in row["layers"]) / 2
    # every timed pass chooses, and reads what was recorded
    timed = {done: blocks for done, blocks in read if done}
    assert list(timed) == list(range(1, len(chosen) + 1))
    assert torch.equal(timed[1], layers[0])
    assert torch.equal(timed[len(chosen)], layers[1])
    assert "recorded" in attention.table([row])


def test_the_package_has_a_small_recording_that_fits_every_shape_up_to_64k() -> None:
    recording, config = attention.recording(""), tercet.NSAConfig()
    assert attention.RECORDED.stat().st_size < 2 << 20
    for name, shape in attention.SHAPES.items():
        if shape.T <= 65536:
            check_fits(recording, attention.RECORDED, config, shape.T, name)
    for place in range(len(recording.layers)):
        blocks = recording.block_indices(place, 8192, 1)
        late = blocks[:, config.select_block * config.select_count :]
        assert (late.diff() > 0).all()  # 16 blocks each, in the order that `block_indices=` needs
        assert 0.6 < attention.agreement(blocks) < 0.8  # about 0.3 in random inputs, over 0.9 in smooth ones


def test_a_recording_must_fit_the_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "s.npz"
    recorded_text(256, file)
    recording, config = load(file), NSA
    check_fits(recording, file, config, 256, "C1x8k")
    with pytest.raises(UsageError, match=r"C1x8k has 257 tokens and .*s.npz 256"):
        check_fits(recording, file, config, 257, "C1x8k")
    with pytest.raises(UsageError, match=r"recorded with select_count=5 and C1x8k has 8"):
        check_fits(recording, file, replace(NSA, select_count=8), 256, "C1x8k")


def test_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    recorded_text(256, tmp_path / "whole.npz")
    content = (tmp_path / "whole.npz").read_bytes()
    for name, damaged in (("short", content[:-30]), ("changed", content[:60] + bytes(40) + content[100:])):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(UsageError, match=f"{name} is not a recording"):
            load(tmp_path / name)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [attention.Shape(1, 8192, 12, 2, 64), attention.Shape(2, 4096, 16, 4, 128)], ids=str)
def test_the_kernels_are_correct_and_timed_with_recorded_blocks(shape, tmp_path: Path, monkeypatch) -> None:
    recorded_text(8192, tmp_path / "s.npz", layers=2, config=tercet.NSAConfig())
    monkeypatch.setitem(attention.SHAPES, "toy", shape)
    options = replace(OPTIONS, graph=True, budget=0.01)
    row = attention.bench("toy", f"recorded:{tmp_path / 's.npz'}", tercet.NSAConfig(), options)
    assert row["correct"], row
    assert 0.8 < row["agreement"] < 0.95
    assert 0 < row["nsa_forward_ms"] < row["nsa_both_ms"]
    assert ("nsa_graph_both_ms" in row) == (shape.D == 64)


def test_a_recording_whose_parts_do_not_fit_is_refused(tmp_path: Path) -> None:
    blocks = torch.full((64, 1, 5), -1, dtype=torch.int32)
    blocks[..., 0] = 0
    whole = make_recording("a run", [LayerSelection(0, NSA, blocks, None)])
    for bits in (whole.bits[..., :4], whole.bits[:0], whole.bits.astype("float32"), whole.bits[0]):
        save(replace(whole, bits=bits), tmp_path / "wrong.npz")
        with pytest.raises(UsageError, match="is not a recording"):
            load(tmp_path / "wrong.npz")
    save(whole, tmp_path / "whole.npz")
    assert load(tmp_path / "whole.npz").tokens == 64
