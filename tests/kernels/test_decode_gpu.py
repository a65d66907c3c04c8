"""Decode on a GPU: one token per row against the reference at real sizes, as a CUDA graph, without synchronisation."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton")

import tercet
from inference.models import greedy_without_cache
from kernels.caches import filled
from tercet.attention.kernels import table
from tercet.attention.reference import block_importance, selector_weight
from tercet.config.load import load
from tercet.inference.decoder import CachedDecoder
from tercet.model.transformer import Transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = tercet.NSAConfig()
LIMIT = {torch.bfloat16: 1e-2, torch.float16: 5e-3, torch.float32: 1e-5}


def make(kind, heads, groups, size, value_size=None, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    layer = kind(64, heads, groups, size, value_size, CONFIG, **options).to("cuda", dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return layer


def stepped(layer, cache, xs, backend: str, lengths=None) -> torch.Tensor:
    """Outputs of a few tokens, one by one."""
    if layer.kind != "dense":
        layer.backend = backend
    with torch.no_grad():
        return torch.stack([layer(x, cache=cache, lengths=lengths) for x in xs])


def relative(found, wanted) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


SHAPES = [(64, 4, 128, None), (12, 2, 64, None), (8, 8, 64, None), (6, 2, 96, None), (32, 2, 192, 128), (20, 1, 32, 40)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.bfloat16) for shape in SHAPES] + [(SHAPES[5], torch.float16), (SHAPES[1], torch.float32)],
    ids=str,
)
def test_steps_equal_the_reference(shape, dtype) -> None:
    layer = make(tercet.NativeSparseAttention, *shape, dtype=dtype)
    # rows before and past every kind of border, some of which complete a block on the way
    cache = filled(layer, [0, 30, 500, 1039, 4095, 20001], 20100)
    other = copy.deepcopy(cache)
    xs = torch.randn(3, 6, 1, 64, device="cuda", dtype=dtype)
    found = stepped(layer, cache, xs, "triton")
    assert layer.routes["selected"] == "triton"
    assert relative(found, stepped(layer, other, xs, "reference")) < LIMIT[dtype]
    assert torch.equal(cache.reads, other.reads)
    assert torch.equal(cache.lengths, other.lengths)
    for name, store in cache._stores.items():
        assert relative(store[:, :-1], other._stores[name][:, :-1]) < LIMIT[dtype], name


LEARNED = {"selector": "learned", "selector_rotary": 16}
OPTIONS = [
    {"compression": "mean", "gate": "softmax"},
    {"shared_kv": True, "qk_norm": True},
    {"compress_selected_keys": True, "compression": "mean"},
    {"branches": ("selected",)},
    {"branches": ("compressed", "window")},
    {"qk_norm": True, "rope_scaling": 4.0, "bias": True},
    {"selector": "learned", "selector_rotary": 0},
    {**LEARNED, "selector_dim": 96, "compress_selected_keys": True},
    {**LEARNED, "branches": ("selected", "window"), "compression": "mean", "rope_max_wavelength": 1000.0},
    {"selector": "own", "branches": ("selected", "window"), "rope_max_wavelength": 1000.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_equal_the_reference_with_any_options(options) -> None:
    layer = make(tercet.NativeSparseAttention, 12, 2, 64, dtype=torch.float32, **options)
    cache = filled(layer, [62, 5000], 5100)
    other = copy.deepcopy(cache)
    xs = torch.randn(4, 2, 1, 64, device="cuda")
    found = stepped(layer, cache, xs, "triton")
    assert relative(found, stepped(layer, other, xs, "reference")) < 1e-5


@pytest.mark.parametrize(
    ("groups", "size", "rotary"), [(1, 32, 16), (2, 64, 32), (4, 32, 0), (8, 40, 12), (2, 256, 64)]
)
def test_a_learned_selector_equals_the_reference(groups, size, rotary) -> None:
    options = {"selector": "learned", "selector_dim": size, "selector_rotary": rotary}
    layer = make(tercet.NativeSparseAttention, 16, groups, 64, dtype=torch.float32, **options)
    # rows before they have a choice, and rows that complete a block on the way
    cache = filled(layer, [0, 30, 509, 1039, 4095, 19998], 20100)
    other = copy.deepcopy(cache)
    xs = torch.randn(3, 6, 1, 64, device="cuda")
    found = stepped(layer, cache, xs, "triton")
    assert relative(found, stepped(layer, other, xs, "reference")) < 1e-5
    assert torch.equal(cache.reads, other.reads)
    for name, store in cache._stores.items():
        assert relative(store[:, :-1], other._stores[name][:, :-1]) < 1e-5, name


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        (tercet.DenseAttention, {}, torch.bfloat16),
        (tercet.WindowAttention, {"qk_norm": True}, torch.float32),
        (tercet.BlockSparseAttention, {}, torch.bfloat16),
        (tercet.BlockSparseAttention, {"selector": "learned"}, torch.float32),
        (tercet.BlockSparseAttention, {"selector": "own"}, torch.float32),
    ],
)
def test_steps_of_other_forms_equal_the_reference(kind, options, dtype, monkeypatch) -> None:
    layer = make(kind, 12, 2, 64, dtype=dtype, **options)
    # 1700: past the tokens that are all selected; before them only the kernels count the keys that would choose
    cache = filled(layer, [0, 1700, 20001], 20100)
    other = copy.deepcopy(cache)
    xs = torch.randn(3, 3, 1, 64, device="cuda", dtype=dtype)
    found = stepped(layer, cache, xs, "triton")
    monkeypatch.setattr("tercet.model.decode.why_not_token_kernels", lambda *_: "not now")
    assert relative(found, stepped(layer, other, xs, "reference")) < LIMIT[dtype]
    assert torch.equal(cache.reads, other.reads)


@pytest.mark.parametrize("selector", ["compressed", "learned"])
@pytest.mark.parametrize("tokens", [65536, 1_000_000])
def test_a_long_context_selects_as_exact_arithmetic_does(tokens: int, selector: str) -> None:
    layer = make(tercet.NativeSparseAttention, 16, 2, 64, selector=selector)
    cache = filled(layer, [tokens - 5], tokens)
    x = torch.randn(1, 1, 64, device="cuda", dtype=torch.bfloat16)
    stepped(layer, cache, x[None], "triton")
    t = tokens - 5
    current, at = t // 64, torch.tensor([[t]], device="cuda")
    with torch.no_grad():
        if selector == "compressed":
            q = layer.project(x, at)[0][0, 0].double().unflatten(0, (2, -1))
            k = cache._stores["k_compressed"][0, : CONFIG.num_compressed(t + 1)].double()
            p = torch.einsum("ghd,sgd->ghs", q, k).mul(64**-0.5).softmax(-1).sum(1)
            scores = block_importance(p, 0, CONFIG.num_blocks(t + 1), CONFIG)
        else:
            q, k = layer.selector(x, at)[0][0, 0].double(), cache._stores["selector"][0, : current * 64].double()
            logits = torch.einsum("gd,sgd->gs", q, k).mul(32**-0.5)
            scores = selector_weight(logits).unflatten(1, (-1, 64)).sum(2)
    for g, blocks in enumerate(cache.block_indices[0].tolist()):
        assert blocks == sorted(set(blocks))
        assert {0, current - 1, current} <= set(blocks)
        free = [j for j in blocks if j not in (0, current - 1, current)]
        rest = scores[g, 1 : current - 1].clone()
        rest[torch.tensor(free, device="cuda") - 1] = 0
        assert float(scores[g, free].min()) >= float(rest.max()) * (1 - 1e-3)


def test_rows_that_stand_still_keep_what_they_hold_and_nothing_waits() -> None:
    layer = make(tercet.NativeSparseAttention, 12, 2, 64)
    cache = filled(layer, [100, 2000, 31], 2100)
    before = {name: store.clone() for name, store in cache._stores.items()}
    xs = torch.randn(2, 3, 1, 64, device="cuda", dtype=torch.bfloat16)
    active = torch.tensor([1, 0, 1], dtype=torch.int32, device="cuda")
    stepped(layer, filled(layer, [5, 5, 5], 2100), xs, "triton", active)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stepped(layer, cache, xs, "triton", active)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.lengths.tolist() == [102, 2000, 33]
    assert all(torch.equal(store[1], before[name][1]) for name, store in cache._stores.items())
    assert int(cache.reads[1].sum()) == 0


def test_the_same_bits_every_time_and_from_poisoned_memory() -> None:
    layer = make(tercet.NativeSparseAttention, 64, 4, 128)
    cache = filled(layer, [9000, 33], 9100)
    xs = torch.randn(4, 2, 1, 64, device="cuda", dtype=torch.bfloat16)
    first = stepped(layer, copy.deepcopy(cache), xs, "triton")
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.equal(stepped(layer, copy.deepcopy(cache), xs, "triton"), first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "options",
    [{}, {"branches": ("window",)}, None, {"selector": "learned", "branches": ("selected", "window")}],
    ids=str,
)
def test_launches_that_overlap_write_the_same_bits(options, monkeypatch) -> None:
    kind = tercet.DenseAttention if options is None else tercet.NativeSparseAttention
    layer = make(kind, 64, 4, 128, **(options or {}))
    held = [filled(layer, [9000, 33], 9100) for _ in range(3)]
    x = torch.randn(2, 1, 64, device="cuda", dtype=torch.bfloat16)

    def replayed(overlap: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        monkeypatch.setattr(table, "PDL_ENABLED", overlap)
        caches = copy.deepcopy(held)
        with torch.no_grad():
            for cache in caches:
                layer(x, cache=cache)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = torch.stack([layer(x, cache=cache) for cache in caches])
        outs = []
        for _ in range(48):
            graph.replay()
            outs.append(out.clone())
        return torch.stack(outs), [store[:, :-1] for cache in caches for store in cache._stores.values()]

    (wanted, stores), (found, others) = replayed(False), replayed(True)
    assert torch.equal(found, wanted)
    assert all(torch.equal(a, b) for a, b in zip(stores, others, strict=True))


@pytest.fixture(scope="module", params=["nsa", "learned", "own", "dense", "window,nsa"])
def model(request) -> Transformer:
    torch.manual_seed(0)
    scorers = {
        "learned": {"attention": "nsa", **LEARNED},
        "own": {"attention": "nsa", "gate": "none", "selector": "own"},
    }
    kinds = scorers.get(request.param, {"attention": request.param})
    config = load(preset="tiny").config.model.model_copy(update=kinds)
    model = Transformer(config).to("cuda").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    return model


def greedy(decoder, prompts: list[list[int]], steps: int) -> list[list[int]]:
    with torch.no_grad():
        decoder.prepare()
        tokens = [decoder.prefill(prompts).argmax(-1)]
        active = torch.ones(len(prompts), dtype=torch.int32, device="cuda")
        for _ in range(steps - 1):
            tokens.append(decoder.step(tokens[-1], active).argmax(-1))
    return torch.stack(tokens, 1).tolist()


def test_a_graph_writes_what_reading_everything_again_writes(model) -> None:
    prompts = [[(37 * i * i + 11) % 251 for i in range(n)] for n in (3, 200, 350)]
    wanted = [greedy_without_cache(model, prompt, 24) for prompt in prompts]
    decoder = CachedDecoder(model, 3, 400)
    assert decoder.graph_reason is None
    assert greedy(decoder, prompts, 24) == wanted
    assert greedy(CachedDecoder(model, 3, 400, graph=False), prompts, 24) == wanted
    assert greedy(CachedDecoder(model, 3, 400, chunk=64), prompts, 24) == wanted


def test_a_full_cache_is_refused_in_a_graph_too(model) -> None:
    decoder = CachedDecoder(model, 1, 12)
    with pytest.raises(ValueError, match="max_len=12"):
        greedy(decoder, [[1] * 8], 10)
