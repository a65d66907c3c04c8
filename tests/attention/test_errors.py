"""Invalid inputs to the operator: one-line errors that name the argument, its value and the rule."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import tercet
from cases import SMALL, Inputs, attend, config, cu, inputs
from tercet.attention.layout import Packing
from tercet.model.config import RopeConfig
from tercet.model.layers import DenseAttention

CFG = config()
X = inputs(CFG, 21, batch=2, dtype=torch.float32)
PACKED = inputs(CFG, 21, documents=(9, 12), dtype=torch.float32)
NAMES = {
    "q": "q", "kc": "k_compressed", "vc": "v_compressed", "ks": "k_selected", "vs": "v_selected",
    "kw": "k_window", "vw": "v_window", "gates": "gates",
}  # fmt: skip
EVERY = tuple(NAMES)
KEYS_VALUES = EVERY[1:-1]
COUNT = X.kc.shape[1]
# What is wrong with a tensor: the names it is tried with, the change, and words of the error besides the name.
WRONG: dict[str, tuple[tuple[str, ...], Callable[[torch.Tensor], torch.Tensor], tuple[str, ...]]] = {
    "rank": (EVERY, lambda x: x[0], ("4",)),
    "one compressed token less": (("kc", "vc"), lambda x: x[:, :-1], (str(COUNT - 1), str(COUNT))),
    "one compressed token more": (("kc", "vc"), lambda x: x[:, [0, *range(COUNT)]], (str(COUNT + 1), str(COUNT))),
    "length": (EVERY[3:], lambda x: x[:, :-2], ("19", "21")),
    "batch": (EVERY[1:], lambda x: x[:1], ()),
    "key size": (("kc", "ks", "kw"), lambda x: x[..., :5], ("5", "8")),
    "value size": (("vs", "vw"), lambda x: x[..., :5], ("5", "6")),
    "KV heads": (("vc", "ks", "vs", "kw", "vw"), lambda x: x[:, :, :1], ()),
    "dtype": (KEYS_VALUES, lambda x: x.double(), ("float64", "float32")),
    "device": (EVERY, lambda x: x.to("meta"), ("meta", "cpu")),
    "one gate": (("gates",), lambda x: x[..., :1], ("1", "3")),
    "four gates": (("gates",), lambda x: x[..., [0, 1, 2, 2]], ("4", "3")),
    "gates of other heads": (("gates",), lambda x: x[:, :, :2], ()),
}


def refusal(call: Callable[[], object], *words: str) -> str:
    with pytest.raises((ValueError, TypeError)) as refused:
        call()
    message = str(refused.value)
    assert "\n" not in message, message
    for word in words:
        assert word in message, f"{word!r} is not named in: {message}"
    return message


def test_the_unmodified_inputs_are_valid():
    assert attend(X, CFG).shape == (2, 21, 4, 6)
    assert attend(PACKED, CFG, cu_seqlens=cu((9, 12)), validate=True).shape == (1, 21, 4, 6)


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, (names, *_) in WRONG.items() for name in names])
def test_a_tensor_that_does_not_fit_is_rejected_by_name(what: str, name: str):
    _, change, words = WRONG[what]
    refusal(lambda: attend(X.with_(**{name: change(getattr(X, name))}), CFG), NAMES[name], *words)


def test_calls_that_do_not_fit_as_a_whole_are_rejected():
    refusal(lambda: attend(X.map(lambda v: v.transpose(1, 2)), CFG), "[batch, tokens, heads, size]")
    few = X.with_(q=X.q[:, :, :3], gates=X.gates[:, :, :3])
    refusal(lambda: attend(few, CFG), "heads=3", "kv_heads=2")
    refusal(lambda: attend(X.map(lambda v: v.long()), CFG), "int64")
    refusal(lambda: attend(X, SMALL), "config")  # type: ignore[arg-type]


def test_packed_documents_need_no_compressed_tokens_if_nothing_reads_them():
    def attend_without(x, **documents):
        selector = (torch.ones(1, x.q.shape[1], 2, 5), torch.ones(1, x.q.shape[1], 2, 5))
        branches = ("selected", "window")
        tensors = (x.q, None, None, x.ks, x.vs, x.kw, x.vw, x.gates)
        return tercet.nsa_attention(*tensors, config=CFG, selector=selector, branches=branches, **documents)

    alone = torch.cat([attend_without(PACKED.map(lambda x, i=i: x[:, i])) for i in (slice(9), slice(9, 21))], 1)
    torch.testing.assert_close(attend_without(PACKED, cu_seqlens=cu((9, 12))), alone)


def test_packed_documents_that_do_not_fit_are_rejected():
    bounds = cu((9, 12))
    refusal(lambda: attend(X, CFG, cu_seqlens=bounds), "cu_seqlens", "2", "1")
    more = PACKED.with_(vc=torch.cat((PACKED.vc, PACKED.vc[:, :1]), dim=1))
    refusal(lambda: attend(more, CFG, cu_seqlens=bounds), "k_compressed", "v_compressed", "equal")
    refusal(lambda: attend(PACKED, CFG, cu_seqlens=bounds, max_seqlen="12"), "max_seqlen is str")
    short: Inputs = PACKED.with_(kc=PACKED.kc[:, :-1], vc=PACKED.vc[:, :-1])
    words = ("k_compressed", str(short.kc.shape[1]), str(PACKED.kc.shape[1]))
    refusal(lambda: attend(short, CFG, cu_seqlens=cu((9, 12)), validate=True), *words)


@pytest.mark.parametrize("branch", ["selected", "window"])
def test_branches_must_have_the_same_kv_heads(branch: str):
    names = ("ks", "vs") if branch == "selected" else ("kw", "vw")
    x = X.with_(**{name: getattr(X, name)[:, :, :1] for name in names})
    refusal(lambda: attend(x, CFG), f"k_{branch} has 1 KV heads", "k_compressed 2")


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([0, 9, 20], ["20", "21"]),
        ([0, 9, 22], ["22", "21"]),
        ([1, 9, 21], ["1"]),
        ([0, 12, 9, 21], ["9"]),
        ([0, -3, 21], ["-3"]),
    ],
    ids=str,
)
def test_wrong_values_of_cu_seqlens_are_rejected_when_validated(bounds, words):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    refusal(lambda: attend(PACKED, CFG, cu_seqlens=cu_seqlens, validate=True), "cu_seqlens", *words)


@pytest.mark.parametrize(
    ("bounds", "word"),
    [
        (torch.tensor([[0, 9, 21]], dtype=torch.int32), "cu_seqlens"),
        (torch.tensor([0.0, 9.0, 21.0]), "float32"),
        (torch.tensor([0], dtype=torch.int32), "cu_seqlens"),
        ([0, 9, 21], "list"),
    ],
    ids=["rank", "dtype", "no document", "list"],
)
def test_malformed_cu_seqlens_are_always_rejected(bounds: object, word: str):
    refusal(lambda: attend(PACKED, CFG, cu_seqlens=bounds), "cu_seqlens", word)


def test_a_document_longer_than_max_seqlen_is_rejected_on_the_cpu():
    documents = (9, 14, 7)
    x = inputs(CFG, 30, documents=documents)
    packed = {"cu_seqlens": cu(documents)}
    for enough in (14, 15, 1000):
        attend(x, CFG, max_seqlen=enough, **packed)
    refusal(lambda: attend(x, CFG, max_seqlen=13, **packed), "max_seqlen=13", "document 1 has 14 tokens", "14 or more")
    refusal(lambda: attend(x, CFG, max_seqlen=0, **packed), "max_seqlen=0", "at least 1")
    refusal(lambda: attend(X, CFG, max_seqlen=14), "max_seqlen=14", "without cu_seqlens")
    with pytest.raises(TypeError, match="max_seqlen is Tensor: it must be an int"):
        attend(x, CFG, max_seqlen=torch.tensor(14), **packed)
    for layer in (tercet.NativeSparseAttention(8, 2, 1, 4, config=CFG), DenseAttention(8, 2, 1, 4)):
        hidden = torch.randn(1, 30, 8)
        assert torch.equal(layer(hidden, max_seqlen=14, **packed), layer(hidden, **packed))
        refusal(lambda: layer(hidden, max_seqlen=13, **packed), "max_seqlen=13", "document 1 has 14 tokens")  # noqa: B023
        refusal(lambda: layer(hidden, max_seqlen=14), "max_seqlen=14", "without cu_seqlens")  # noqa: B023
        packing = Packing(cu(documents), 30, 30 // CFG.compress_stride, CFG)
        refusal(lambda: layer(hidden, packing, max_seqlen=14), "with a Packing")  # noqa: B023


@pytest.mark.parametrize("blocks", [[0, 2, 2, -1], [0, 2, 1, -1], [-1, 0, 1, 2], [0, -1, 1, -1]], ids=str)
def test_given_blocks_out_of_order_are_rejected_when_validated(blocks: list[int]):
    given = torch.tensor([0, 1, 2, 5], dtype=torch.int32).repeat(2, 21, 2, 1)
    attend(X, CFG, block_indices=given, validate=True)  # 5 is after every query's own block: it is not read
    given[1, 20, 1] = torch.tensor(blocks)
    words = f"block_indices[1, 20, 1] is {blocks}", "ascend, each once, padded with -1 at the end"
    refusal(lambda: attend(X, CFG, block_indices=given, validate=True), *words)
    refusal(
        lambda: tercet.block_sparse_attention(X.q, X.ks, X.vs, config=CFG, block_indices=given, validate=True), *words
    )


@pytest.mark.parametrize("kind", ["NativeSparseAttention", "BlockSparseAttention", "WindowAttention", "DenseAttention"])
def test_layers_reject_what_they_would_misread(kind: str):
    """Inputs without elements, lists instead of tensors, and bounds of other tokens."""
    layer = getattr(tercet, kind)(8, 2, 1, 4, config=CFG)
    for shape in ((1, 0, 8), (0, 5, 8)):
        refusal(lambda: layer(torch.randn(shape)), str(list(shape)), "at least one token")  # noqa: B023
    for shape in ((9, 8), (1, 9, 7)):
        refusal(lambda: layer(torch.randn(shape)), f"x has shape {list(shape)}", "[batch, tokens, 8]")  # noqa: B023
    refusal(lambda: layer(torch.randn(1, 5, 8), [0, 5]), "cu_seqlens is list", "int32 tensor")
    packing = Packing(cu((2, 3)), 5, 5 // CFG.compress_stride, CFG)
    for shape, words in (((1, 7, 8), "tokens 5 but the call has 7"), ((2, 5, 8), "batch 1 but the call has 2")):
        refusal(lambda: layer(torch.randn(shape), packing), words)  # noqa: B023
    if kind != "DenseAttention":
        other = Packing(cu((2, 3)), 5, 5 // CFG.compress_stride, config(window=7))
        refusal(lambda: layer(torch.randn(1, 5, 8), other), "packing was made for config")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_operators_reject_inputs_without_elements(backend: str):
    calls: tuple[Callable[[Inputs], object], ...] = (
        lambda x: attend(x, CFG, backend),
        lambda x: tercet.block_sparse_attention(x.q, x.ks, x.vs, config=CFG, backend=backend),
        lambda x: tercet.window_attention(x.q, x.kw, x.vw, config=CFG),
        lambda x: tercet.select_blocks(x.q, config=CFG),
        lambda x: tercet.compress_mean(x.q, config=CFG),
    )
    for call in calls:
        for none in (X.map(lambda v: v[:, :0]), X.map(lambda v: v[:0])):
            refusal(lambda: call(none), str(list(none.q.shape)), "at least one element")  # noqa: B023
    refusal(lambda: attend(X.with_(vs=X.vs[..., :0]), CFG, backend), "v_selected", "[2, 21, 2, 0]")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 4.7}, "heads=4.7"),
        ({"heads": 12, "kv_heads": 5}, "heads=12 is not a multiple of kv_heads=5: pick one of 1, 2, 3, 4, 6, 12"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"value_dim": 0}, "value_dim=0"),
        ({"dim": 0}, "dim=0"),
        ({"head_dim": 4.5}, "head_dim=4.5 must be a positive integer"),
        *(({"rope_theta": wrong}, "rope_theta=") for wrong in (0, -1.0, math.nan, math.inf, True, "1e4")),
        ({"rope_scaling": math.nan}, "rope_scaling=nan"),
        ({"rope_max_wavelength": math.nan}, "rope_max_wavelength=nan"),
        ({"rope": "linear"}, "rope is str"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0"),
        ({"selector": "learned", "selector_dim": 4.5}, "selector_dim=4.5"),
        ({"selector": "learned", "selector_dim": 0}, "selector_dim=0"),
        ({"selector": "learned", "selector_rotary": 34}, "selector_rotary=34"),
    ],
    ids=str,
)
def test_sizes_that_mean_nothing_are_rejected(options: dict[str, object], words: str):
    sizes = {"dim": 8, "heads": 2, "kv_heads": 1, "head_dim": 4} | options
    kinds = (tercet.NativeSparseAttention, tercet.BlockSparseAttention, tercet.WindowAttention, tercet.DenseAttention)
    for kind in kinds[: 2 if "selector" in options else 4]:
        refusal(lambda: kind(**sizes), words)  # noqa: B023


def test_unknown_forms_are_rejected_with_what_there_is():
    def make(**options: object) -> object:
        return tercet.NativeSparseAttention(8, 2, 1, 4, **options)  # type: ignore[arg-type]

    refusal(lambda: make(branches=("windw",)), "windw")
    refusal(lambda: make(branches=()), "branches")
    refusal(lambda: make(gate="tanh"), "gate", "tanh", "sigmoid", "softmax")
    refusal(lambda: make(compression="max"), "compression", "max", "mlp", "mean")
    refusal(lambda: make(backend="cuda"), "backend", "cuda", "auto", "reference", "triton")


def test_numbers_of_caches_and_rope_settings_are_rejected():
    layer = tercet.WindowAttention(8, 2, 1, 4, config=CFG)
    for wrong in (0, 1.5, True, "1", math.nan):
        refusal(lambda: layer.make_cache(wrong), "batch=")  # noqa: B023
        refusal(lambda: layer.make_cache(1, wrong), "max_len=")  # noqa: B023
    refusal(lambda: RopeConfig("yarn", attention_factor=math.nan), "rope.attention_factor=nan")
    refusal(lambda: RopeConfig("llama3", original_length=4.5), "rope.original_length=4.5")  # type: ignore[arg-type]
    refusal(lambda: RopeConfig("llama3", fast=math.inf), "rope.fast=inf")


def test_second_derivatives_are_rejected(backend: str):
    x = X.leaves()
    # autograd could differentiate q · q again, and the result would miss the operator's share
    out = attend(x.with_(q=x.q * x.q), CFG, backend).sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*second derivatives") as refused:
        torch.autograd.grad(out, x.q, create_graph=True)
    assert "\n" not in str(refused.value)
