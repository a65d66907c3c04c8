"""The attention layers: against the oracle, their laws, initialisation and errors."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.func import functional_call

import layer_oracle
import tercet
from cases import config, cu
from oracle import causal_attention, rope
from tercet.attention import dense
from tercet.attention.config import BRANCHES
from tercet.attention.dense import dense_route
from tercet.attention.layout import Packing
from tercet.attention.stages import compression_blocks
from tercet.model.attention import Attention
from tercet.model.config import NSA_ONLY
from tercet.model.layers import DenseAttention
from tercet.model.rope import Rotary, rope_cache, rotate

CFG = config()
# As in preset m7c: blocks are selected by means of the selected keys, in compression blocks that do not overlap.
AS_M7C = {"cfg": config(compress_block=CFG.compress_stride), "compression": "mean", "compress_selected_keys": True}


def make(cfg=CFG, *, kind=tercet.NativeSparseAttention, trained: bool = True, dtype=torch.float64, **options):
    """A layer with random weights (`trained`), or freshly initialised."""
    sizes = {"dim": 12, "heads": 4, "kv_heads": 2, "head_dim": 4, **options}
    layer = kind(config=cfg, **sizes).to(dtype)
    if trained:
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=0.5)
    return layer


def sequence(tokens: int, batch: int = 1, dim: int = 12, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(batch, tokens, dim, dtype=dtype)


def assert_equals_oracle(layer, x, cu_seqlens=None, **rope_options) -> None:
    expected, _ = layer_oracle.run(layer, x, cu_seqlens, **rope_options)
    torch.testing.assert_close(layer(x, cu_seqlens=cu_seqlens), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


OPTIONS = [
    {},
    {"compression": "mean"},
    {"gate": "softmax"},
    {"shared_kv": True},
    {"qk_norm": True},
    {"qk_norm": True, "shared_kv": True, "gate": "softmax", "bias": True},
    {"compress_selected_keys": True},
    {"compress_selected_keys": True, "qk_norm": True, "bias": True, "value_dim": 7},
    AS_M7C,
    {"value_dim": 7},
    {"heads": 3, "kv_heads": 3},
    {"heads": 5, "kv_heads": 1},
    {"bias": True},
]


# RoPE uses fp32 cos/sin in the layer, so it matches the float64 oracle to single precision.
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_layer_equals_its_oracle(options):
    assert_equals_oracle(make(**options), sequence(29, batch=2))


@pytest.mark.parametrize(
    "options",
    [{}, {"shared_kv": True}, {"compress_selected_keys": True}, {"compression": "mean", "qk_norm": True}, AS_M7C],
    ids=str,
)
def test_the_layer_with_packed_documents_equals_its_oracle(options):
    documents = (1, 13, 3, 0, 12)
    assert_equals_oracle(make(**options), sequence(29), cu(documents))


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"heads": 3, "kv_heads": 3}, {"bias": True}], ids=str)
@pytest.mark.parametrize("documents", [None, (1, 19, 0, 33)], ids=["whole", "packed"])
def test_a_window_layer_equals_its_oracle(options, documents):
    layer = make(kind=tercet.WindowAttention, value_dim=3, **options)
    x = sequence(sum(documents or [3 * CFG.window + 1]), 1 if documents else 2)
    expected = torch.from_numpy(layer_oracle.one_branch(layer, x, cu(documents)).out)
    torch.testing.assert_close(layer(x, cu(documents)), expected, rtol=1e-5, atol=1e-5)


def test_a_window_layer_has_the_parameters_of_a_dense_one_and_no_others():
    window, dense = (make(kind=kind, qk_norm=True) for kind in (tercet.WindowAttention, DenseAttention))
    assert {n: p.shape for n, p in window.state_dict().items()} == {n: p.shape for n, p in dense.state_dict().items()}


def test_the_route_says_why_the_kernels_did_not_run():
    layer = make(kind=tercet.WindowAttention)
    layer(sequence(9))
    assert layer.routes == {"window": "reference"}
    assert "CUDA" in layer.routes["window"].reason or "Triton" in layer.routes["window"].reason
    layer.backend = "triton"
    with pytest.raises(RuntimeError, match='backend="triton" cannot run'):
        layer(sequence(9))


@pytest.mark.parametrize(("theta", "scaling"), [(50.0, 1.0), (500.0, 2.5)])
def test_rope_theta_and_position_scaling_apply_to_all_branches_alike(theta: float, scaling: float):
    layer = make(rope_theta=theta, rope_scaling=scaling)
    assert_equals_oracle(layer, sequence(29), theta=theta, scaling=scaling)


def test_channels_with_a_longer_wavelength_than_the_limit_compare_content_at_any_distance():
    rotary = Rotary(8, theta=10000.0, max_wavelength=100.0)  # wavelengths 6, 63, 628 and 6,283 positions
    x = torch.randn(1, 1, 1, 8)
    far = rotate(x, rotary.cos_sin(torch.tensor([12_345])))
    unchanged = (far == x).flatten()
    assert unchanged.tolist() == [False, False, True, True] * 2
    everywhere = Rotary(8, theta=10000.0, max_wavelength=10_000.0).cos_sin(torch.arange(50))
    torch.testing.assert_close(everywhere, Rotary(8, theta=10000.0).cos_sin(torch.arange(50)), rtol=0, atol=0)


def test_the_compressed_key_is_rotated_once_at_the_position_of_its_last_token():
    """With fast rotation and this branch alone, rotating before the mean or one token off would be far away."""
    layer = make(branches=("compressed",), rope_theta=2.0, compression="mean")
    x = sequence(30)
    assert_equals_oracle(layer, x, theta=2.0)
    wrong, _ = layer_oracle.run(layer, x, theta=2.2)
    assert (layer(x).detach() - torch.from_numpy(wrong)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("branches", "gate"),
    [
        *(((branch,), "sigmoid") for branch in BRANCHES),
        (("compressed", "selected"), "sigmoid"),
        (("compressed", "window"), "softmax"),
        (("selected", "window"), "softmax"),
    ],
)
def test_branches_can_be_omitted(branches, gate):
    assert_equals_oracle(make(branches=branches, gate=gate), sequence(33))


def test_a_softmax_is_over_the_branches_of_the_layer():
    layer, x = make(branches=("selected", "window"), gate="softmax"), sequence(33)
    gates = layer.gate(x)
    assert (gates[..., 0] == 0).all()
    torch.testing.assert_close(gates.sum(-1), torch.ones_like(gates[..., 0]))


def test_a_layer_that_reads_no_compressed_tokens_has_no_parameters_for_them():
    options = {"branches": ("selected", "window"), "selector": "learned", "compress_selected_keys": True}
    layer, x = make(**options, compression="mlp"), sequence(CFG.selected_tokens)  # every block is read
    assert not any(name.startswith("compress") for name, _ in layer.named_parameters())
    assert layer.kv_proj.out_features == 2 * 2 * (2 * 4)  # two sets of keys and values
    assert_equals_oracle(layer, x)


def test_dense_attention_is_full_causal_attention():
    layer = tercet.DenseAttention(12, 4, 2, 4, value_dim=3).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    for documents in (None, (30,), (1, 12, 17)):
        x = sequence(30)
        outs = []
        for part in x.split(documents or 30, 1):
            tokens = part.shape[1]
            q = layer.q_proj(part).view(1, tokens, 4, 4).detach()
            kv = layer.kv_proj(part).detach()
            k, v = kv[..., :8].reshape(1, tokens, 2, 4), kv[..., 8:].reshape(1, tokens, 2, 3)
            dense = causal_attention(rope(q, range(tokens)), rope(k, range(tokens)), v)
            outs.append(layer.o_proj(torch.from_numpy(dense).flatten(2)))
        torch.testing.assert_close(layer(x, cu_seqlens=cu(documents)), torch.cat(outs, 1), rtol=1e-5, atol=1e-5)


# --- initialisation ---


@pytest.mark.parametrize(("gate", "share"), [("sigmoid", 0.5), ("softmax", 1 / 3)])
def test_all_gates_start_equal(gate: str, share: float):
    layer = make(trained=False, gate=gate)
    gates = layer.gate(sequence(20, batch=2) * 10)
    assert gates.shape == (2, 20, 4, 3)
    torch.testing.assert_close(gates, torch.full_like(gates, share), rtol=1e-12, atol=0)


def test_mlp_compression_starts_as_the_mean_and_learns():
    torch.manual_seed(3)
    mlp = make(trained=False, compression="mlp")
    mean = make(trained=False, compression="mean")
    mean.load_state_dict(mlp.state_dict(), strict=False)
    x = sequence(33, batch=2)
    torch.testing.assert_close(mlp(x), mean(x), rtol=1e-12, atol=1e-12)
    mlp(x).square().sum().backward()
    down = mlp.compress_k.down.weight.grad
    assert down is not None
    assert down.abs().sum() > 0
    torch.optim.SGD(mlp.parameters(), lr=1.0).step()
    assert not torch.allclose(mlp.compress_k(torch.ones(1, 8, 2, 4).double()), torch.ones(1, 3, 2, 4).double())


def test_compress_selected_keys_drops_the_compressed_key_projection():
    layer = make(compress_selected_keys=True)
    assert make().kv_proj.out_features - layer.kv_proj.out_features == layer.kv_heads * layer.head_dim
    _, raw, keys, _ = layer.project(x := sequence(29), torch.zeros(29, dtype=torch.long))  # no rotation
    torch.testing.assert_close(raw, keys["selected"])
    assert not torch.allclose(raw, keys["window"])
    with torch.no_grad():  # zeroing the selected keys zeroes the compressed ones
        layer.kv_proj.weight[layer.kv_heads * layer.value_dim :][: layer.kv_heads * layer.head_dim] = 0
    assert not layer.project(x, None)[1].any()


@pytest.mark.parametrize("options", [
    {"selector": "learned", "branches": ("selected", "window")}, {"shared_kv": True}, {"compress_selected_keys": True},
], ids=str)  # fmt: skip
def test_keys_that_several_branches_share_are_normalised_once(options):
    layer, calls = make(qk_norm=True, **options), []
    for norm in layer.k_norms:
        norm.register_forward_hook(lambda norm, *_: calls.append(norm))
    layer(sequence(29))
    assert calls == list(layer.k_norms)


# --- laws ---


GRADCHECKED = [
    {},
    {"gate": "softmax", "shared_kv": True},
    {"compress_selected_keys": True, "bias": True},
    {"qk_norm": True, "value_dim": 3},
    {"compression": "mean", "bias": True},
]


@pytest.mark.parametrize("options", GRADCHECKED, ids=str)
def test_gradcheck_of_the_layer_in_its_input_and_every_parameter(options, fast_mode):
    cfg = config(compress_block=2, compress_stride=1, select_block=2, select_count=3, select_local=1, window=3)
    layer = make(cfg, dim=3, heads=2, kv_heads=1, head_dim=2, **options)
    names = [n for n, _ in layer.named_parameters()]

    def run(x, *values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    x = sequence(6, dim=3).requires_grad_()
    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert gradcheck(run, (x, *parameters), atol=1e-6, rtol=1e-4, fast_mode=fast_mode)


def test_every_parameter_gets_a_finite_gradient_even_without_compressed_tokens():
    for tokens in (1, 2, 40):
        layer = make(qk_norm=True, bias=True)
        layer(sequence(tokens)).square().sum().backward()
        for name, p in layer.named_parameters():
            if tokens == 40:
                assert p.grad is not None, name
                assert p.grad.abs().sum() > 0, name
            assert p.grad is None or torch.isfinite(p.grad).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_layer_runs_in_the_dtype_of_its_weights(dtype: torch.dtype):
    layer = make(trained=False, dtype=dtype)
    y = layer(sequence(30, dtype=dtype))
    assert y.dtype == dtype
    assert torch.isfinite(y).all()


def test_autocast_stays_close_to_full_precision():
    layer = make(trained=False, dtype=torch.float32)
    x = sequence(40, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        y.float().square().sum().backward()
    full = layer(x)
    assert (y.float() - full).norm() / full.norm() < 3e-2
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize("documents", [(29,), (11, 2, 25, 1), (1, 13, 3, 0, 12), (3, 3, 3)], ids=str)
def test_compressing_packed_chunks_equals_compressing_blocks(documents):
    """Outputs and gradients, except padding, which is never read."""
    layer, tokens = make(), sum(documents)
    packing = Packing(cu(documents), tokens, tokens // CFG.compress_stride, CFG)
    real = int(packing.compressed_cu_seqlens[-1])
    found, wanted = [], []
    for compress, into in (
        (lambda x: layer.compress_k(x, packing), found),
        (lambda x: layer.compress_k.phi(compression_blocks(x, CFG, packing)), wanted),
    ):
        x = torch.randn(1, tokens, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        out = compress(x.requires_grad_())[:, :real]
        grads = torch.autograd.grad(out.square().sum(), [x, *layer.compress_k.parameters()])
        into += [out.detach(), *grads]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_a_shared_rope_cache_changes_nothing():
    x = sequence(29)
    for bounds in (None, cu((11, 18))):
        packing = None if bounds is None else Packing(bounds, 29, 29 // CFG.compress_stride, CFG)
        for layer in (make(), DenseAttention(12, 4, 2, 4).double()):
            rope = rope_cache(layer.rotary, x, packing, CFG)
            torch.testing.assert_close(layer(x, packing, rope=rope), layer(x, packing), rtol=0, atol=0)


def test_dense_attention_ignores_nsa_arguments_and_rejects_unknown_ones():
    sparse = (tercet.NativeSparseAttention, tercet.BlockSparseAttention)
    taken = [p for layer in (*sparse, Attention) for p in signature(layer).parameters.values()]
    assert {p.name for p in taken} >= {*NSA_ONLY, "backend", "config"} - {"nsa"}
    DenseAttention(12, 4, 2, 4, **{p.name: p.default for p in taken if p.default is not p.empty})
    for unknown in ("nsa", "windows"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{unknown}'"):
            DenseAttention(12, 4, 2, 4, **{unknown: None})


def test_varlen_attn_gets_the_bound_on_document_length(monkeypatch):
    dense._varlen_options()  # cache those of the real function
    lengths = []

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        lengths.append((max_q, max_k))
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    q = torch.randn(1, 20, 4, 4)
    for bound in (15, None, 1000):
        dense._varlen(q, q, q, Packing(cu((5, 15)), 20, 0, CFG, bound))
    assert lengths == [(15, 15), (20, 20), (20, 20)]


def test_a_single_token_is_not_given_to_cudnn_which_has_no_kernel_for_it():
    with FakeTensorMode():
        q = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16, device="cuda")
    assert dense_route(q, q) == ("sdpa", None)


def test_hooks_on_all_modules_see_the_projections():
    layer, called = make(), set()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: called.add(module))
    try:
        layer(sequence(9))
    finally:
        hook.remove()
    assert {layer.q_proj, layer.kv_proj, layer.gate.proj, layer.compress_k.up, layer.compress_v.up} <= called
