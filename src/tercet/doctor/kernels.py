"""The check of the kernels: outputs and gradients against the reference on this device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tercet.attention.config import NSAConfig
from tercet.doctor.machine import FAILED, NOT_TESTED, OK, WARNING, Finding
from tercet.model.config import ModelConfig

# The tolerances of every backend: ‖Δ‖ / ‖reference‖ with the same blocks, and the fraction of equal selected blocks.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
MIN_EQUAL_BLOCKS = 0.9995


class Unsupported(Exception):
    """The kernels do not support this model; the reference does."""


def parity(
    model: ModelConfig,
    *,
    short: bool = False,
    packed: bool = True,
    precision: str = "bf16",
    seq_len: int | None = None,
) -> Finding:
    """Compare outputs and gradients of the kernels with the reference, at the sizes of the run.

    short: only what training will run (its packing, precision and length), so that no extra kernels are compiled.
    """
    import torch

    if not torch.cuda.is_available():
        return Finding("kernel parity", NOT_TESTED, "no GPU, so no kernels will run")
    if importlib.util.find_spec("triton") is None:
        missing = "Triton is not installed: only the reference backend runs"
        return Finding("kernel parity", WARNING, missing, "pip install 'tercet[kernels]'")
    results, worst = [], OK
    trained, other = (torch.float32, torch.bfloat16) if precision == "fp32" else (torch.bfloat16, torch.float32)
    cases = [(trained, packed)]
    if not short:
        cases += [(trained, not packed), (other, packed)]
    for dtype, documents in cases:
        name = str(dtype).removeprefix("torch.")
        try:
            T = check_length(model.nsa, name, packed=documents, seq_len=seq_len if short else None)
            forward, backward, same_blocks = compare(model, dtype, device="cuda", packed=documents, length=T)
        except Unsupported as reason:
            fix = "change the sizes, or set model.backend=reference"
            return Finding("kernel parity", WARNING, f"the kernels do not support this model: {reason}", fix)
        # Not max(), which drops a NaN that does not come first.
        good = all(error <= TOLERANCE[name] for error in (forward, backward)) and same_blocks >= MIN_EQUAL_BLOCKS
        what = f"{name}, {T:,} tokens of {'packed documents' if documents else 'one document'}"
        errors = f"forward {forward:.1e}, backward {backward:.1e}"
        results.append(f"{what}: {errors}, {100 * same_blocks:.3f}% of selected blocks equal")
        worst = worst if good else FAILED
    fix = "" if worst == OK else "do not train with these kernels: use model.backend=reference, and report a bug"
    return Finding("kernel parity", worst, "; ".join(results), fix)


def check_length(cfg: NSAConfig, precision: str, *, packed: bool, seq_len: int | None = None) -> int:
    """Tokens to compare: enough that selection has a choice and, in bf16, that the long-document kernels run too.

    seq_len: of the run, to check only the kernels that it uses.
    """
    selected = cfg.selected_tokens
    short = max(1024, (3 if packed else 2) * selected)
    # The selected branch uses another kernel where the queries of a tile read more than about three times the blocks
    # of one query. The fp32 tolerance of 1e-5 is established at the short length only.
    if precision == "float32" or (seq_len is not None and seq_len <= short):
        return short
    return max(short, min(8 * selected, 8192))


def compare(
    model: ModelConfig,
    dtype: Any,
    *,
    device: str,
    length: int | None = None,
    backend: str = "triton",
    packed: bool = True,
) -> tuple[float, float, float]:
    """(relative error of the output, largest relative error of a gradient, fraction of equal selected blocks).

    A NaN counts as an infinite error.
    """
    import torch

    from tercet.attention.dispatch import why_not_triton
    from tercet.attention.operator import block_sparse_attention, nsa_attention
    from tercet.attention.selector import slow_channels

    cfg: NSAConfig = model.nsa
    T = length or check_length(cfg, "float32", packed=packed)
    heads, groups, dk = model.heads, model.kv_heads, model.head_dim
    dv = model.value_dim or dk
    generator = torch.Generator(device="cpu").manual_seed(1337)

    def tensor(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_(True)

    gated = model.spec("nsa").gated
    operator: Callable[..., Any] = nsa_attention if gated else block_sparse_attention
    scored = {}
    if not gated and model.selector == "own":
        scored = {"scorer": "own", "score_channels": slow_channels(dk)}
    lengths = {"compressed": cfg.num_compressed(T), "selected": T, "window": T} if gated else {"selected": T}
    inputs, names = [tensor(1, T, heads, dk)], ["q"]
    for branch, tokens in lengths.items():
        inputs += [tensor(1, tokens, groups, dk), tensor(1, tokens, groups, dv)]
        names += [f"k_{branch}", f"v_{branch}"]
    if backend == "triton":
        reason = why_not_triton(dict(zip(names, inputs, strict=True)), cfg)
        if reason is not None:
            raise Unsupported(reason)
    if gated:  # fp32, as in the layer
        inputs.append(torch.rand(1, T, heads, 3, generator=generator).to(device).requires_grad_(True))
    weight = torch.randn(1, T, heads, dv, generator=generator).to(device, torch.float32)
    exact = [x.detach().float().requires_grad_(True) for x in inputs]
    bounds = longest = None
    if packed:  # one document too short for a compressed token, and two more, one of them long enough to choose blocks
        first = min(cfg.compress_block - 1, T // 4)
        bounds = torch.tensor([0, first, first + T // 4, T], dtype=torch.int32, device=device)
        longest = T - first - T // 4  # as in a packed training step

    def run(tensors: list[Any], backend: str, blocks: Any = None) -> tuple[Any, list[Any], Any]:
        options = {"backend": backend, "return_aux": True, "block_indices": blocks, **scored}
        out, aux = operator(*tensors, config=cfg, cu_seqlens=bounds, max_seqlen=longest, **options)
        return out, list(torch.autograd.grad((out.float() * weight).sum(), tensors)), aux.block_indices

    expected, expected_grads, blocks = run(exact, "reference")
    got, grads, _ = run(inputs, backend, blocks)
    _, _, selected = run(inputs, backend)
    real = blocks >= 0
    shared = ((blocks[..., :, None] == selected[..., None, :]).any(-1) & real).sum()
    backward = max(relative_error(a, b) for a, b in zip(grads, expected_grads, strict=True))
    return relative_error(got, expected), backward, float(shared / real.sum())


def relative_error(got: Any, expected: Any) -> float:
    got, expected = got.detach().double(), expected.detach().double()
    error = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
    return error if error == error else float("inf")
