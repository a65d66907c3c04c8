"""KV caches: full prefill, chunked prefill and decoding give the same outputs; bytes and reads are counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import layer_oracle
import tercet
from cases import config, configs, cu
from tercet.model.config import RopeConfig
from tercet.model.layers import BlockSparseAttention, DenseAttention, NativeSparseAttention, WindowAttention

CFG = config()
# As in preset m7c: blocks are selected by means of the selected keys, in compression blocks that do not overlap.
AS_M7C = {"cfg": config(compress_block=CFG.compress_stride), "compression": "mean", "compress_selected_keys": True}
# No shrinking: it takes a minute and adds nothing.
QUICK = (Phase.explicit, Phase.generate)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
LEARNED = {"selector": "learned", "selector_dim": 6, "selector_rotary": 4}


FORMS = [
    {}, {"shared_kv": True}, {"compress_selected_keys": True}, {"qk_norm": True, "gate": "softmax"}, LEARNED,
    {"branches": ("window",)}, {"branches": ("compressed",)},
    {"kind": DenseAttention}, {"kind": WindowAttention, "qk_norm": True},
    {"selector": "own", "exact_groups": ()}, {"kind": BlockSparseAttention, "selector": "own", "exact_groups": (1,)},
    {"kind": BlockSparseAttention}, {"kind": BlockSparseAttention, "dense_below": 25, **LEARNED},
]  # fmt: skip


def make(cfg: tercet.NSAConfig = CFG, kind=tercet.NativeSparseAttention, **options):
    sizes = {"dim": 12, "heads": 4, "kv_heads": 2, "head_dim": 4, "value_dim": 3, **options}
    layer = kind(config=cfg, **sizes).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return layer


def feed(layer, x: torch.Tensor, sizes: list[int], max_len: int | None = None):
    """Feed x in chunks of the given sizes through one cache; returns (outputs, cache)."""
    cache = layer.make_cache(x.shape[0], max_len)
    with torch.no_grad():
        return torch.cat([layer(part, cache=cache) for part in x.split(sizes, 1)], 1), cache


@st.composite
def splits(draw: st.DrawFn, tokens: int) -> list[int]:
    sizes = []
    while sum(sizes) < tokens:
        sizes.append(draw(st.integers(1, tokens - sum(sizes))))
    return sizes


@settings(max_examples=36, phases=QUICK)
@given(cfg=configs(), data=st.data())
def test_any_chunking_equals_the_whole_sequence(cfg, data: st.DataObject):
    torch.manual_seed(data.draw(st.integers(0, 999)))
    tokens = data.draw(st.integers(1, 50))
    layer = make(cfg, **data.draw(st.sampled_from(FORMS)))
    x = torch.randn(data.draw(st.integers(1, 2)), tokens, 12, dtype=torch.float64)
    sizes = data.draw(splits(tokens))
    max_len = data.draw(st.sampled_from([None, tokens, tokens + 9]))
    chunked, cache = feed(layer, x, sizes, max_len)
    torch.testing.assert_close(chunked, layer(x), **CLOSE)
    assert cache.lengths.tolist() == [tokens] * x.shape[0]


OPTIONS = [
    {},
    {"compression": "mean"},
    {"shared_kv": True},
    {"compress_selected_keys": True},
    AS_M7C,
    {"gate": "softmax", "qk_norm": True},
    {"rope_scaling": 3.0},
    {"rope_max_wavelength": 100.0},
    {"rope_scaling": 4.0, "rope": RopeConfig("yarn", original_length=20)},
    {"branches": ("compressed",)},
    {"branches": ("selected",)},
    {"branches": ("window",)},
    {"branches": ("selected", "window")},
    {"branches": ("compressed", "window"), "shared_kv": True},
    {"heads": 3, "kv_heads": 3},
    {"heads": 5, "kv_heads": 1},
    LEARNED,
    {**LEARNED, "branches": ("selected", "window"), "qk_norm": True},
    {**LEARNED, "selector_rotary": 6, "rope_scaling": 3.0, "rope_max_wavelength": 100.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decoding_token_by_token_equals_the_whole_sequence(options):
    layer = make(**options)
    x = torch.randn(2, 33, 12, dtype=torch.float64)
    for max_len in (None, 33):
        decoded, _ = feed(layer, x, [1] * 33, max_len)
        torch.testing.assert_close(decoded, layer(x), **CLOSE)


@settings(max_examples=30, phases=QUICK)
@given(data=st.data())
def test_rows_of_different_lengths_equal_each_row_alone(data: st.DataObject):
    """Chunks are padded on the right with garbage; every row has its own length in every chunk, and may pause."""
    torch.manual_seed(data.draw(st.integers(0, 999)))
    layer = make(**data.draw(st.sampled_from(FORMS)))
    rows = data.draw(st.integers(1, 3))
    cache = layer.make_cache(rows, data.draw(st.sampled_from([None, 80])))
    fed: list[list[torch.Tensor]] = [[] for _ in range(rows)]
    got: list[list[torch.Tensor]] = [[] for _ in range(rows)]
    for _ in range(data.draw(st.integers(1, 4))):
        width = data.draw(st.integers(1, 20))
        lengths = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows).filter(any))
        x = torch.full((rows, width, 12), 1e3, dtype=torch.float64)
        for r, n in enumerate(lengths):
            x[r, :n] = torch.randn(n, 12, dtype=torch.float64)
            fed[r].append(x[r, :n])
        with torch.no_grad():
            y = layer(x, cache=cache, lengths=torch.tensor(lengths))
        for r, n in enumerate(lengths):
            got[r].append(y[r, :n])
    for r in range(rows):
        if (whole := torch.cat(fed[r])[None]).shape[1]:
            torch.testing.assert_close(torch.cat(got[r])[None], layer(whole), **CLOSE)
    assert cache.lengths.tolist() == [sum(map(len, parts)) for parts in fed]


@pytest.mark.parametrize("options", [{}, LEARNED], ids=str)
def test_nan_padding_does_not_spread(options):
    layer = make(**options)
    x = torch.randn(2, 19, 12, dtype=torch.float64)
    x[1, 7:] = float("nan")
    one = torch.ones(2, 3, 12, dtype=torch.float64)
    one[:, 1:] = float("nan")
    cache = layer.make_cache(2)
    with torch.no_grad():
        y = layer(x, cache=cache, lengths=torch.tensor([19, 7]))
        after = layer(one, cache=cache, lengths=torch.tensor([1, 1]))
    alone = layer(torch.cat([x[1:, :7], one[:1, :1]], 1))
    torch.testing.assert_close(y[1:, :7], alone[:, :7], **CLOSE)
    torch.testing.assert_close(after[1:, :1], alone[:, 7:], **CLOSE)
    assert torch.isfinite(after[:, 0]).all()


@pytest.mark.parametrize("max_len", [None, 60], ids=["growing", "preallocated"])
def test_poisoned_memory_changes_nothing(max_len, request):
    layer = make(**LEARNED)
    x = torch.randn(2, 45, 12, dtype=torch.float64)
    clean, _ = feed(layer, x, [7, 1, 1, 20, 16], max_len)
    request.getfixturevalue("poisoned")
    dirty, _ = feed(layer, x, [7, 1, 1, 20, 16], max_len)
    torch.testing.assert_close(clean, dirty, rtol=0, atol=0)


# --- counted ---


def expected_reads(layer, x: torch.Tensor) -> torch.Tensor:
    """num_cmp + selected tokens + min(w, t + 1), from the oracle's own selection. [B, T, G]"""
    cfg = layer.config
    _, answer = layer_oracle.run(layer, x)
    reads = torch.zeros(x.shape[0], x.shape[1], layer.kv_heads, dtype=torch.int64)
    for (b, t, g), selection in answer.selections.items():
        selected = sum(1 for s in range(t + 1) if s // cfg.select_block in selection.chosen)
        reads[b, t, g] = cfg.num_visible(t) + selected + min(cfg.window, t + 1)
    return reads


def test_decode_reads_compressed_selected_and_window_keys_and_no_more():
    layer = make()
    x = torch.randn(2, 45, 12, dtype=torch.float64)
    expected = expected_reads(layer, x)
    cache = layer.make_cache(2)
    with torch.no_grad():
        for t in range(45):
            layer(x[:, t : t + 1], cache=cache)
            if cache.reads is not None:
                assert torch.equal(cache.reads, expected[:, t : t + 1]), t
            else:
                assert t == 0
    assert int(expected[0, 44, 0]) < 2 * 45


def test_a_later_chunk_reads_the_same_keys_as_decode():
    layer = make()
    x = torch.randn(1, 45, 12, dtype=torch.float64)
    cache = layer.make_cache(1)
    with torch.no_grad():
        layer(x[:, :20], cache=cache)
        layer(x[:, 20:], cache=cache)
    assert torch.equal(cache.reads, expected_reads(layer, x)[:, 20:])


def tensors_within(thing, seen: set[int]) -> list[torch.Tensor]:
    """Every tensor that an object holds, recursively."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    else:
        parts = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    return [t for part in parts for t in tensors_within(part, seen)]


@pytest.mark.parametrize("max_len", [None, 60], ids=["growing", "preallocated"])
def test_nbytes_counts_every_tensor_held(max_len):
    layer = make()
    x = torch.randn(2, 41, 12, dtype=torch.float64)
    cache = layer.make_cache(2, max_len)
    with torch.no_grad():
        for part in x.split([13, 1, 1, 26], 1):
            layer(part, cache=cache)
            kept = [t for t in tensors_within(cache, set()) if t is not cache.lengths and t is not cache.reads]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
            assert cache.nbytes() == sum(storages.values())
    assert cache.nbytes() > 0


def test_a_cache_keeps_no_autograd_graph():
    layer = make()
    cache = layer.make_cache(1)
    layer(torch.randn(1, 20, 12, dtype=torch.float64, requires_grad=True), cache=cache)
    assert not any(t.requires_grad for t in tensors_within(cache, set()))


# --- errors ---


def refused(call, *words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)


X = torch.randn(1, 9, 12, dtype=torch.float64)


@pytest.mark.parametrize(("other", "words"), [
    ({"cfg": config(window=7)}, ["window", "7", "6"]),
    ({"cfg": config(select_count=5)}, ["select_count", "5", "4"]),
    ({"heads": 4, "kv_heads": 4}, ["kv_heads", "4", "2"]),
    ({"head_dim": 8}, ["head_dim", "8", "4"]),
    ({"value_dim": 5}, ["value_dim", "5", "3"]),
    ({"shared_kv": True}, ["shared_kv"]),
    (LEARNED, ["selector_rotary=4", "selector_rotary=None"]),
], ids=lambda v: str(v) if isinstance(v, dict) else "")  # fmt: skip
def test_a_cache_of_another_config_is_rejected(other, words):
    cache = make(**other).make_cache(1)
    refused(lambda: make()(X, cache=cache), "cache", *words)
    dense = make(kind=DenseAttention)
    refused(lambda: make()(X, cache=dense.make_cache(1)), "cache")
    refused(lambda: dense(X, cache=make().make_cache(1)), "cache")


def test_a_lower_precision_cache_saves_bytes_at_the_cost_of_rounding():
    layer = make()
    x = torch.randn(1, 40, 12, dtype=torch.float64)
    whole, half = layer.make_cache(1), layer.make_cache(1, dtype=torch.float32)
    with torch.no_grad():
        for part in x.split([13, 1, 26], 1):
            a, b = layer(part, cache=whole), layer(part, cache=half)
            assert b.dtype == torch.float64
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert half.nbytes() * 2 == whole.nbytes()


def test_tokens_beyond_max_len_are_rejected_and_leave_the_cache_unchanged():
    layer = make()
    cache = layer.make_cache(1, 10)
    with torch.no_grad():
        layer(X, cache=cache)
        refused(lambda: layer(X[:, :2], cache=cache), "max_len", "10", "11")
        assert cache.lengths.tolist() == [9]
        last = layer(X[:, :1], cache=cache)
    torch.testing.assert_close(last, layer(torch.cat([X, X[:, :1]], 1))[:, 9:], **CLOSE)


def test_arguments_that_do_not_fit_are_rejected():
    layer = make()
    refused(lambda: layer(X, cache=layer.make_cache(3)), "batch", "1", "3")
    for lengths in ([10], [-1], [3, 3]):
        refused(lambda: layer(X, cache=layer.make_cache(1), lengths=torch.tensor(lengths)), "lengths")  # noqa: B023
    refused(lambda: layer(X, cu_seqlens=cu((4, 5)), cache=layer.make_cache(1)), "cu_seqlens", "cache")
    refused(lambda: layer(X, lengths=torch.tensor([5])), "lengths", "cache")
    for batch, max_len, word in ((0, None, "batch=0"), (1, 0, "max_len=0"), (1, -3, "max_len=-3")):
        refused(lambda: layer.make_cache(batch, max_len), word)  # noqa: B023


def test_under_autocast_decoding_selects_like_the_whole_sequence():
    torch.manual_seed(0)
    config = tercet.NSAConfig(4, 2, 8, 4, 1, 1, 6)
    layer = tercet.NativeSparseAttention(32, 4, 2, 8, config=config)
    layer.init_weights(0.5, 0.5)
    x = torch.randn(1, 120, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = layer(x)
        cache = layer.make_cache(1)
        parts = [layer(x[:, :40], cache=cache)]
        parts += [layer(x[:, t : t + 1], cache=cache) for t in range(40, 120)]
    torch.testing.assert_close(torch.cat(parts, 1).float(), whole.float(), atol=0.1, rtol=0.05)
    assert layer.routes["compressed"].reason is not None


@pytest.mark.parametrize("tokens", [1, 2])
def test_requested_kernels_that_cannot_run_raise(tokens):
    layer = tercet.NativeSparseAttention(16, 2, 1, 8)
    cache = layer.make_cache(1)
    layer(torch.randn(1, 5, 16), cache=cache)
    layer.backend = "triton"
    with pytest.raises(RuntimeError, match=r"cannot run here: .*need a CUDA device"):
        layer(torch.randn(1, tokens, 16), cache=cache)
    assert cache.lengths.tolist() == [5]


def test_the_cache_stores_only_what_branches_read():
    """Only the selected branch needs all tokens, and shared_kv stores them once. Compressed tokens are stored if they
    are attended to or score the blocks."""
    tokens, per_slot = 256, 2 * (4 + 3) * 8
    compressed = CFG.num_compressed(tokens)

    def kept(**options) -> int:
        layer = make(config(window=16), **options)
        cache = layer.make_cache(1, tokens)
        with torch.no_grad():
            layer(torch.randn(1, tokens, 12, dtype=torch.float64), cache=cache)
        return cache.nbytes() // per_slot

    spare = 6
    assert kept() <= tokens + compressed + 16 + CFG.compress_block + spare
    assert kept(shared_kv=True) <= tokens + compressed + CFG.compress_block + spare
    assert kept(branches=("compressed", "window")) <= compressed + 16 + CFG.compress_block + spare
    assert kept(branches=("window",)) <= 16 + spare
    selector = 8 * tokens * 2 * 4 // per_slot
    learned = {"selector": "learned", "selector_dim": 4, "selector_rotary": 0}
    assert kept(branches=("selected", "window"), **learned) <= tokens + 16 + selector + spare


def test_the_cache_of_a_window_does_not_grow_with_the_sequence():
    layer = make(kind=WindowAttention)
    short, long = layer.make_cache(1, 8), layer.make_cache(1, 100_000)
    assert long.nbytes() == short.nbytes() == 8 * 2 * (CFG.window + 1) * (4 + 3)
    _, grown = feed(layer, torch.randn(1, 400, 12, dtype=torch.float64), [50] * 8)
    assert grown.nbytes() == short.nbytes()


@pytest.mark.parametrize("kind", [tercet.NativeSparseAttention, tercet.DenseAttention])
@pytest.mark.parametrize("max_len", [None, 60])
def test_rows_prefilled_alone_continue_together(kind, max_len):
    layer = make(kind=kind)
    x = torch.randn(2, 40, 12, dtype=torch.float64)
    cache = layer.make_cache(2, max_len)
    with torch.no_grad():
        for row, tokens in enumerate((31, 9)):
            alone = layer.make_cache(1, tokens)
            layer(x[row : row + 1, :tokens], cache=alone)
            cache.put_row(row, alone)
        assert cache.lengths.tolist() == [31, 9]
        last = layer(torch.stack([x[0, 31:36], x[1, 9:14]]), cache=cache)
    torch.testing.assert_close(last[:1], layer(x[:1])[:, 31:36], **CLOSE)
    torch.testing.assert_close(last[1:], layer(x[1:])[:, 9:14], **CLOSE)


def test_a_row_that_does_not_fit_is_rejected_and_leaves_the_cache_unchanged():
    layer = make()
    cache, alone = layer.make_cache(2, 8), layer.make_cache(1, 9)
    with torch.no_grad():
        layer(X, cache=alone)
    refused(lambda: cache.put_row(0, alone), "max_len=8", "9")
    assert cache.lengths.tolist() == [0, 0]
    assert cache.known_lengths() == [0, 0]
    refused(lambda: cache.put_row(0, make(value_dim=5).make_cache(1)), "value_dim=5", "value_dim=3")
    refused(lambda: cache.put_row(0, layer.make_cache(3)), "batch 3")


class Adapter(nn.Module):
    """Adds to a linear layer, without a weight of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.out_features = base, base.out_features

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


@pytest.mark.parametrize("build", [DenseAttention, WindowAttention, BlockSparseAttention, NativeSparseAttention])
def test_a_prompt_runs_through_adapters(build):
    layer = build(32, 4, 2, 16, selector="learned")
    x = torch.randn(1, 40, 32)
    layer.kv_proj = Adapter(layer.kv_proj)
    if build in (BlockSparseAttention, NativeSparseAttention):
        layer.selector.k_proj = Adapter(layer.selector.k_proj)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, cache=layer.make_cache(1)), layer(x))
