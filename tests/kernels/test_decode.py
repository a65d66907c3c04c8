"""Decode steps of the kernels, interpreted in fp32 and fp16: the reference's outputs, stores and reads."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch

import tercet
from kernels.caches import filled
from tercet.attention.config import BRANCHES
from tercet.attention.kernels import decode
from tercet.attention.kernels.decode.attend import read_stages
from tercet.attention.kernels.decode.common import Scores
from tercet.attention.kernels.decode.scores import select_blocks
from tercet.attention.reference import block_importance
from tercet.model.config import ModelConfig, RopeConfig
from tercet.model.rope import Rotary
from tercet.model.transformer import Transformer

pytestmark = pytest.mark.interpreter

CFG = tercet.NSAConfig(
    compress_block=8, compress_stride=4, select_block=16, select_count=4, select_initial=1, select_local=2, window=24
)


def make(kind=tercet.NativeSparseAttention, dtype=torch.float32, **options):
    sizes = {"dim": 16, "heads": 3, "kv_heads": 1, "head_dim": 8, "value_dim": 6, "config": CFG, **options}
    layer = kind(**sizes).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def twin(layer, cache):
    """Another cache that holds the same."""
    other = layer.make_cache(cache.batch, cache.max_len)
    other._stores = {name: store.clone() for name, store in cache._stores.items()}
    other.lengths, other.host_lengths = cache.lengths.clone(), cache.host_lengths
    return other


@pytest.fixture
def reference(monkeypatch):
    """A step on the reference: `reference(layer, x, cache, lengths)`."""

    def run(layer, x, cache, lengths=None):
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr("tercet.model.decode.why_not_token_kernels", lambda *_: "not now")
            return layer(x, cache=cache, lengths=lengths)

    return run


def compare(reference, layer, lengths: list[int], active: list[list[int] | None], limit: float = 1e-5) -> None:
    cache = filled(layer, lengths, max(lengths) + 8)
    other = twin(layer, cache)
    for rows in active:
        x = torch.randn(len(lengths), 1, 16, dtype=layer.q_proj.weight.dtype)
        told = None if rows is None else torch.tensor(rows)
        with torch.no_grad():
            found = layer(x, cache=cache, lengths=told)
        assert set(layer.routes.values()) == {"triton"}
        wanted = reference(layer, x, other, told)
        real = torch.ones(len(lengths), dtype=torch.bool) if rows is None else told.bool()
        error = (found - wanted)[real].float().norm() / wanted[real].float().norm()
        assert float(error) < limit, (rows, error)
        assert torch.equal(cache.lengths, other.lengths)
        assert torch.equal(cache.reads[real], other.reads[real])
        assert int(cache.reads[~real].sum()) == 0
        assert cache.host_lengths == other.host_lengths
    for name, store in cache._stores.items():
        torch.testing.assert_close(store[:, :-1], other._stores[name][:, :-1], atol=limit * 10, rtol=limit * 10)


# Rows below the first block, just before and after the borders of compression blocks (8, 12, …) and selection blocks.
@pytest.mark.parametrize(("lengths", "active"), [([6, 98], [None, [1, 0], None]), ([0, 15], [[1, 1], None])])
def test_rows_of_unequal_lengths_equal_the_reference(lengths, active, reference):
    compare(reference, make(), lengths, active)


@pytest.mark.parametrize(
    ("options", "length"), [({}, 79), ({"selector": "learned", "compress_selected_keys": True}, 127)], ids=str
)
def test_half_precision_equals_the_reference(options, length, reference):
    compare(reference, make(dtype=torch.float16, compression="mean", **options), [length], [None], limit=5e-3)


def test_the_copied_weights_of_a_dtype_stay_where_a_cuda_graph_may_read_them():
    layer = make()
    cache, layers = layer.make_cache(1), (layer.q_proj, layer.kv_proj)
    first, _ = cache.fused_weights(layers, torch.float32)
    cache.fused_weights(layers, torch.float16)  # under autocast
    assert cache.fused_weights(layers, torch.float32)[0] is first


LEARNED = {"compression": "mean", "selector": "learned", "selector_dim": 16, "selector_rotary": 8}
OWN = {"selector": "own"}
YARN = {"rope_scaling": 3.0, "rope_max_wavelength": 500.0, "rope": RopeConfig("yarn", original_length=100)}
BLOCKS_OF_128 = replace(CFG, select_block=128, select_initial=0, select_local=1, select_count=2)
OPTIONS = [
    ({"heads": 4, "kv_heads": 2, "gate": "softmax", "qk_norm": True, "shared_kv": True, "bias": True, **YARN}, 131),
    ({"compress_selected_keys": True, "qk_norm": True, "norm_eps": 0.1, "bias": True}, 131),
    ({"compression": "mean", "heads": 5, "head_dim": 16, "value_dim": 20}, 111),
    *(({"compression": "mean", "branches": (branch,)}, 99) for branch in BRANCHES),
    ({"compression": "mean", "branches": ("compressed", "window")}, 99),
    ({"compression": "mean", "branches": ("selected", "window"), "gate": "softmax"}, 99),
    ({**LEARNED, "branches": ("selected",)}, 127),
    ({**LEARNED, "branches": ("selected", "window")}, 127),
    ({**LEARNED, "selector_dim": 100, "config": BLOCKS_OF_128}, 1000),
    # scored by all channels of 3 heads, by 32 of 40 of 2, and for the selected branch of NSA by 32 of 48
    ({"kind": tercet.BlockSparseAttention, **OWN}, 250),
    ({"kind": tercet.BlockSparseAttention, **OWN, "heads": 6, "kv_heads": 3, "head_dim": 40, **YARN}, 250),
    ({"kind": tercet.BlockSparseAttention, **OWN, "head_dim": 64, "config": BLOCKS_OF_128, "qk_norm": True}, 1000),
    ({"compression": "mean", **OWN, "heads": 4, "kv_heads": 2, "head_dim": 48}, 131),
]


@pytest.mark.parametrize(("options", "length"), OPTIONS, ids=str)
def test_any_options_equal_the_reference(options, length, reference):
    compare(reference, make(**options), [length], [None])


def test_small_numbers_are_normed_in_half_precision_as_the_reference_does(reference):
    """Mean squares far below the eps of half precision: which eps is added decides the whole result."""
    layer = make(tercet.DenseAttention, torch.float16, qk_norm=True)
    for weight in (layer.q_proj.weight, layer.kv_proj.weight):
        torch.nn.init.normal_(weight, std=1e-3)
    for norm in (layer.q_norm, layer.k_norm):
        assert norm.eps is None
        torch.nn.init.ones_(norm.weight)
    compare(reference, layer, [20], [None], limit=5e-3)


# A learned selector: before it has a choice, at the border of a block (127 + 1 = 8 · 16), and over several tiles of
# keys. With all, some or none of its channels rotated: 6 and 12 are no powers of two.
@pytest.mark.parametrize("rotary", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 12))])
def test_a_learned_selector_equals_the_reference(rotary, reference):
    layer = make(**LEARNED | {"selector_dim": 12, "selector_rotary": rotary, "heads": 4, "kv_heads": 2}, **YARN)
    compare(reference, layer, [6, 127, 1300], [None, [0, 1, 1], None])


def test_an_adapter_in_the_selector_is_called(reference):
    layer = make(compression="mean", selector="learned", selector_dim=16, selector_rotary=8)
    layer.selector.k_proj.register_forward_hook(lambda module, args, out: -out)
    compare(reference, layer, [127], [None])


@pytest.mark.parametrize("selector", ["compressed", "learned"])
def test_a_step_has_two_products_and_copies_no_keys(selector, monkeypatch):
    """One for queries, keys, values, gates and a learned selector, and one for the output."""
    layer = make(compression="mean", selector=selector, selector_dim=16, selector_rotary=8, compress_selected_keys=True)
    cache, x, called = filled(layer, [60], 70), torch.randn(1, 1, 16), []
    linear, cat = torch.nn.functional.linear, torch.cat
    with torch.no_grad():
        layer(x, cache=cache)  # copies the weights
        monkeypatch.setattr("torch.nn.functional.linear", lambda *args: called.append("linear") or linear(*args))
        monkeypatch.setattr("torch.cat", lambda *args: called.append("cat") or cat(*args))
        layer(x, cache=cache)
    assert called == ["linear"] * 2


@pytest.mark.parametrize("options", [LEARNED, {**OWN, "head_dim": 40}], ids=str)
def test_tokens_after_a_prompt_choose_and_read_as_the_whole_sequence_does(options):
    layer = make(**{"compression": "mean", "heads": 4, "kv_heads": 2, **options})
    x = torch.randn(1, 300, 16)
    cache, seen, chosen = layer.make_cache(1), [], []
    layer.backend = "reference"
    with torch.no_grad():
        parts = [layer(x[:, :294], cache=cache)]
        layer.backend = "triton"
        for t in range(294, 300):
            parts.append(layer(x[:, t : t + 1], cache=cache))
            chosen.append(cache.block_indices)
        layer.backend = "reference"
        layer.stats.update = lambda gates, blocks, packing: seen.append(blocks)
        whole = layer(x)
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
        assert torch.equal(torch.stack(chosen, 1), seen[0][:, 294:])
        layer.selector, layer.spec = None, replace(layer.spec, scorer="compressed")
        assert not torch.equal(layer(x), whole)  # compressed scores choose other blocks


def test_dense_decode_equals_the_reference(reference):
    compare(reference, make(tercet.DenseAttention, qk_norm=True), [0, 70], [None, [0, 1]])


@pytest.mark.parametrize(
    ("selector", "scoring"), [("compressed", "k_compressed"), ("learned", "selector"), ("own", "k_selected")]
)
def test_equal_scores_take_the_lowest_index(selector, scoring):
    layer = make(compression="mean", selector=selector)
    cache = filled(layer, [150], 160)
    cache._stores[scoring].zero_()
    with torch.no_grad():
        layer(torch.randn(1, 1, 16), cache=cache)
    assert cache.block_indices.tolist() == [[[0, 1, 8, 9]]]


def test_scores_that_are_equal_in_different_splits_are_a_tie():
    """One key stands out and moves the highest score of its split; all others are equal wherever they stand."""
    layer = make(compression="mean", config=replace(CFG, select_count=6))
    cache = filled(layer, [400], 410)
    cache._stores["k_compressed"].zero_()
    cache._stores["k_compressed"][:, 80:84] = 3.0  # of block 20
    with torch.no_grad():
        layer(torch.randn(1, 1, 16), cache=cache)
    assert cache.block_indices[0, 0].tolist() in ([0, 1, 2, 3, 24, 25], [0, 1, 20, 21, 24, 25])


@pytest.mark.parametrize(
    ("tokens", "count", "d", "block"),
    [(900, 16, 4, 16), (2100, 16, 4, 16), (4300, 40, 4, 16), (1300, 16, 16, 16), (1300, 5, 1, 16)],
)
def test_blocks_are_chosen_as_sorting_them_all_would(tokens, count, d, block):
    """By one program, by the last of several from their lists, and from lists too long for comparing each with each."""
    config = replace(CFG, compress_block=max(2, d), compress_stride=d, select_block=block, select_count=count)
    heads, groups, current, seen = 4, 2, tokens // block, config.num_compressed(tokens + 1)
    logits = torch.randn(2, heads, config.num_compressed(tokens + 70))
    logits[1] = 0  # all equal: the first ones
    lse = torch.logsumexp(logits[..., :seen] * math.log(2), -1, keepdim=True) / math.log(2)
    indices = torch.full((2, groups, count), -7, dtype=torch.int32)
    lengths, arrived = torch.tensor([tokens] * 2), torch.zeros(2 * groups, dtype=torch.int32)
    select_blocks(Scores(logits, lse), indices, lengths, None, arrived, 1, config.num_blocks(tokens + 70), config)
    p = torch.exp2(logits[..., :seen].double() - lse.double()).unflatten(1, (groups, -1)).sum(2)
    scores = block_importance(p, 0, current + 1, config)[..., 1 : current - 1]
    order = scores.sort(descending=True, stable=True).indices[..., : count - 3] + 1
    chosen = [[[0, *sorted(blocks), current - 1, current] for blocks in row] for row in order.tolist()]
    assert indices.tolist() == chosen
    assert chosen[1] == [[*range(count - 2), current - 1, current]] * groups
    assert not arrived.any()


@pytest.mark.parametrize(("tokens", "count"), [(900, 16), (2100, 16), (4300, 40), (20_000, 16)])
def test_blocks_are_chosen_by_a_selectors_scores_as_sorting_them_all_would(tokens, count):
    """Scores may be infinite, or not a number, which is the lowest; equal ones take the lowest index."""
    config, groups = replace(CFG, select_count=count), 2
    current = tokens // config.select_block
    scores = torch.randn(2, groups, config.num_blocks(tokens + 70)).exp()
    scores[0, 0, 5::7], scores[0, 0, 6::7], scores[0, 1, 10:] = torch.nan, 0.0, 0.0
    scores[1, 0] = 2.0
    scores[1, 0, 20:23] = torch.tensor([-0.0, 0.0, torch.inf])
    indices = torch.full((2, groups, count), -7, dtype=torch.int32)
    lengths, arrived = torch.tensor([tokens] * 2), torch.zeros(2 * groups, dtype=torch.int32)
    select_blocks(Scores(scores, None), indices, lengths, None, arrived, 1, config.num_blocks(tokens + 70), config)
    free = scores[..., 1 : current - 1].nan_to_num(nan=0.0, posinf=torch.inf)
    order = free.sort(descending=True, stable=True).indices[..., : count - 3] + 1
    assert indices.tolist() == [
        [[0, *sorted(blocks), current - 1, current] for blocks in row] for row in order.tolist()
    ]
    assert not arrived.any()


@pytest.mark.parametrize("selector", ["compressed", "learned"])
def test_the_number_of_splits_and_of_blocks_per_part_changes_nothing(selector, monkeypatch):
    config = replace(CFG, select_count=8)
    layer = make(compression="mean", selector=selector, selector_dim=64, selector_rotary=0, config=config)
    heads = decode.Heads(3, 1, 8, 6, 0 if layer.selector is None else layer.selector.size)
    outs = []
    q, kv, gates = torch.randn(1, 1, 24), torch.randn(1, 1, 42), torch.randn(1, 1, 9)
    scored = None if layer.selector is None else (torch.randn(1, 1, 64), torch.randn(1, 1, 64))
    torch.manual_seed(0)
    cache = filled(layer, [800], 810)
    for splits, per in ((1, 1), (3, 4), (2, 3)):
        monkeypatch.setattr(decode.step, "_scoring_programs", lambda *_, n=splits: n)
        mine = twin(layer, cache)
        held = decode.Held(
            mine.lengths,
            mine.rope_frequencies(),
            mine.capacity,
            **mine.stores(),
            arrived=mine.arrival_counters(decode.arrivals(1, 1)),
        )
        out, read, blocks = decode.nsa_step(
            q, kv, gates, held, None, config, heads, branches=layer.spec.branches, shared=False, softmax_gate=False,
            norms=None, phi=(decode.CompressionWeights(),) * 2, splits=splits, per=per, selector=scored,
        )  # fmt: skip
        outs.append((out, read.sum(-1), blocks))
    for out, read, blocks in outs[1:]:
        torch.testing.assert_close(out, outs[0][0], atol=1e-6, rtol=1e-5)
        assert torch.equal(read, outs[0][1])
        assert torch.equal(blocks, outs[0][2])


def test_a_token_past_the_room_is_refused_and_nothing_changes():
    layer = make(compression="mean")
    cache = filled(layer, [30], 30)
    with pytest.raises(ValueError, match="max_len=30"):
        layer(torch.randn(1, 1, 16), cache=cache)
    assert cache.lengths.tolist() == [30]


@pytest.mark.parametrize(("dtype", "size", "block", "stages"), [
    (torch.bfloat16, 128, 64, 3),
    (torch.bfloat16, 128, 128, 3),
    (torch.float32, 128, 128, 2),
    (torch.bfloat16, 256, 128, 2),
    (torch.float32, 256, 64, 2),
    (torch.float32, 256, 128, None),
], ids=str)  # fmt: skip
def test_blocks_that_shared_memory_does_not_hold_are_refused(dtype, size, block, stages):
    config = tercet.NSAConfig(select_block=block)
    device = torch.device("cpu")
    assert read_stages(device, dtype, 4, size, size, config) == stages
    reason = decode.unsupported(device, dtype, decode.Heads(8, 2, size, size), config)
    if stages is not None:
        assert reason is None
    else:
        assert reason == (
            "a block of select_block=128 with Dk=256, Dv=256 in float32 takes 294912 bytes of shared memory, "
            "and there are 232448"
        )


def test_a_selector_that_small_gpus_have_no_shared_memory_for_is_refused(monkeypatch):
    """Blocks of 128 keys of 256 numbers: compiled for sm_86, the launch takes 144 KiB in fp32."""
    monkeypatch.setattr("tercet.attention.kernels.table.shared_memory", lambda device: 99 << 10)
    config, heads = tercet.NSAConfig(select_block=128), decode.Heads(8, 2, 64, 64, 256)
    reasons = [
        decode.unsupported(torch.device("cpu"), dtype, heads, config) for dtype in (torch.float32, torch.float16)
    ]
    assert reasons[1] is None
    assert "by 256 channels in float32" in reasons[0]


def test_a_wide_window_leaves_no_more_parts_than_the_merge_holds():
    """2,000 tiles of 16: one to a program would be as many parts."""
    config = replace(CFG, window=32_000)
    layer = make(compression="mean", config=config)
    cache = filled(layer, [40], 48)
    with torch.no_grad():
        layer(torch.randn(1, 1, 16), cache=cache)
    assert set(layer.routes.values()) == {"triton"}
    assert cache._read_parts.shape[-1] <= 2 * decode.step.MOST_SPLITS


def test_a_cache_that_grows_decodes_on_the_kernels_while_its_blocks_are_not_too_many(monkeypatch):
    """Eight blocks of 16 are the most here: tokens 121 … 128 still fit, the 129th does not."""
    monkeypatch.setattr("tercet.model.cache.MOST_DECODED_BLOCKS", 8)
    monkeypatch.setattr("tercet.attention.kernels.decode.step.MOST_DECODED_BLOCKS", 8)
    layer = make(compression="mean")
    x = torch.randn(1, 130, 16)
    cache = layer.make_cache(1)
    with torch.no_grad():
        parts = [layer(x[:, :126], cache=cache)]
        for t, route, room in ((126, "triton", 128), (127, "triton", 128), (128, "reference", 192)):
            parts.append(layer(x[:, t : t + 1], cache=cache))
            assert set(layer.routes.values()) == {route}, t
            assert cache.capacity == room
        assert "room for 192 tokens is more than 8 blocks" in str(layer.routes["window"].reason)
        layer.backend = "reference"
        torch.testing.assert_close(torch.cat(parts, 1), layer(x[:, :129]), atol=1e-5, rtol=1e-5)


def test_a_step_that_fails_leaves_the_lengths_to_the_device(monkeypatch):
    layer = make(compression="mean")
    cache = filled(layer, [30], 31)
    x = torch.randn(1, 1, 16)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(decode, "nsa_step", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            layer(x, cache=cache)
    with torch.no_grad():
        layer(x, cache=cache)  # the 31st token, which fits: the one that failed was not kept
    assert cache.known_lengths() == cache.lengths.tolist() == [31]


def test_sizes_beyond_the_kernels_go_to_the_reference_and_say_so():
    config = tercet.NSAConfig(compress_block=6, compress_stride=3, select_block=12, select_count=4, window=8)
    layer = tercet.NativeSparseAttention(16, 2, 1, 8, config=config)
    cache = layer.make_cache(1)
    with torch.no_grad():
        layer(torch.randn(1, 5, 16), cache=cache)
        layer(torch.randn(1, 1, 16), cache=cache)
    assert layer.routes["window"] == "reference"
    assert "compress_block=6 is not a power of two" in str(layer.routes["window"].reason)


@pytest.mark.parametrize(
    ("selector", "chunks"), [("compressed", [4, 5, 14]), ("learned", [70, 5, 14])], ids=["compressed", "learned"]
)
def test_a_prompt_in_chunks_runs_on_the_kernels_and_equals_the_whole(selector, chunks):
    layer = make(compression="mean", head_dim=16, value_dim=16, selector=selector)
    x = torch.randn(2, sum(chunks), 16)
    cache = layer.make_cache(2, 100)
    parts = []
    with torch.no_grad():
        for part in x.split(chunks, 1):
            parts.append(layer(part, cache=cache))
            assert set(layer.routes.values()) == {"triton"}
        layer.backend = "reference"
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("held", "lengths"), [([30, 31], [2, 2]), ([30, 30], [2, 1])])
def test_rows_that_do_not_begin_or_end_at_one_place_run_on_the_kernels_one_by_one(held, lengths):
    layer = make(compression="mean", head_dim=16, value_dim=16)
    cache, x = filled(layer, held, 40), torch.randn(2, 2, 16)
    other = twin(layer, cache)
    with torch.no_grad():
        out = layer(x, cache=cache, lengths=torch.tensor(lengths))
        assert set(layer.routes.values()) == {"triton"}
        layer.backend = "reference"
        expected = layer(x, cache=other, lengths=torch.tensor(lengths))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_step_on_an_empty_cache_computes_no_angles_outside_the_kernels(monkeypatch):
    # decoders capture their step before the prompt is read
    sizes = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn_dim": 16, "vocab_size": 8}
    model = Transformer(ModelConfig(**sizes, attention="nsa,dense", nsa=asdict(CFG)))
    caches = [layer.make_cache(1, 16) for layer in model.attention_layers()]
    monkeypatch.setattr(Rotary, "cos_sin", lambda *_: pytest.fail("angles were computed"))
    with torch.no_grad():
        model.hidden(torch.zeros(1, 1, dtype=torch.int64), cache=caches)
    assert all(set(layer.routes.values()) == {"triton"} for layer in model.attention_layers())


# ------------------------------------------------------------ a layer with window attention only


@pytest.mark.parametrize("bounds", [None, [0, 3, 40, 40, 75]], ids=["whole", "packed"])
def test_a_window_layers_outputs_and_gradients_equal_the_reference(bounds):
    layer = make(tercet.WindowAttention)
    x = torch.randn(1 if bounds else 2, 75, 16, requires_grad=True)
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    dout = torch.randn_like(x)
    results = []
    for backend in ("reference", "triton"):
        layer.backend = backend
        out = layer(x, cu)
        assert layer.routes == {"window": backend}
        results.append((out, *torch.autograd.grad(out, (x, *layer.parameters()), dout)))
    for wanted, found in zip(*results, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_a_window_layers_chunk_after_a_cache_equals_the_whole_sequence():
    layer = make(tercet.WindowAttention, backend="triton")
    x = torch.randn(2, 64, 16)
    with torch.no_grad():
        cache = layer.make_cache(2, 64)
        parts = [layer(part, cache=cache) for part in x.split([10, 9, 45], 1)]
        assert layer.routes == {"window": "triton"}
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "bias": True}], ids=str)
def test_steps_of_a_window_layer_equal_the_reference(reference, options):
    compare(reference, make(tercet.WindowAttention, **options), [0, 6, 98], [None, [1, 0, 1], None])


def test_a_window_layers_cache_longer_than_block_scores_allow_still_decodes_on_the_kernels():
    layer = make(tercet.WindowAttention)
    cache = layer.make_cache(1, 10_000_000)
    with torch.no_grad():
        layer(torch.randn(1, 1, 16), cache=cache)
    assert layer.routes == {"window": "triton"}
