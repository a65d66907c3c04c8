"""Whether Triton compiles and runs, and whether the kernels give on this very device what the reference gives."""

from __future__ import annotations

import importlib.util
from typing import Any

from tercet.attention.config import NSAConfig
from tercet.doctor.machine import FAILED, NOT_TESTED, OK, WARNING, Finding
from tercet.model.config import ModelConfig

# The laws that every backend is held to: ‖Δ‖ / ‖reference‖ with the same blocks, and the share of equal slots.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
SLOTS = 0.9995
# Of the architecture that is compiled for where there is no GPU.
OFFLINE_TARGET = 90


class Unsupported(Exception):
    """The kernels do not run this model; the reference does."""


def triton_works() -> Finding:
    """A kernel of our own, compiled and run; without a GPU only compiled."""
    if importlib.util.find_spec("triton") is None:
        return Finding(
            "triton",
            WARNING,
            "Triton is not installed: only the reference backend runs",
            "pip install 'tercet[kernels]'",
        )
    import torch
    import triton

    from tercet.doctor.triton_probe import add_one

    if not torch.cuda.is_available():
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        source = ASTSource(add_one, {"x": "*fp32", "y": "*fp32", "n": "i32"}, constexprs={"BLOCK": 128})
        made = triton.compile(source, target=GPUTarget("cuda", OFFLINE_TARGET, 32))
        size = len(made.asm.get("cubin", b""))
        if not size:
            return Finding("triton", FAILED, f"Triton {triton.__version__} made no binary", "reinstall triton")
        return Finding(
            "triton", OK, f"Triton {triton.__version__} compiles for sm_{OFFLINE_TARGET}; no GPU to run it on"
        )
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    y = torch.full_like(x, torch.nan)
    add_one[(8,)](x, y, x.numel(), BLOCK=128)
    if not torch.equal(y, x + 1):
        return Finding(
            "triton",
            FAILED,
            f"Triton {triton.__version__} runs, but x + 1 is wrong",
            "reinstall triton and torch together",
        )
    return Finding("triton", OK, f"Triton {triton.__version__} compiles and runs")


def parity(
    model: ModelConfig | None = None,
    *,
    short: bool = False,
    packed: bool = True,
    precision: str = "bf16",
    seq_len: int | None = None,
) -> Finding:
    """Outputs and gradients of the kernels against the reference, at the run's own sizes.

    In short only what training will run: its documents in its precision, long ones if its sequences are. Those kernels
    have to be compiled anyway.
    """
    import torch

    if not torch.cuda.is_available():
        return Finding("kernel parity", NOT_TESTED, "there is no GPU here, so no kernels will run")
    if importlib.util.find_spec("triton") is None:
        return Finding("kernel parity", NOT_TESTED, "Triton is not installed", "pip install 'tercet[kernels]'")
    model = model or ModelConfig()
    told, worst = [], OK
    trained, other = (torch.float32, torch.bfloat16) if precision == "fp32" else (torch.bfloat16, torch.float32)
    cases = [(trained, packed)]
    if not short:
        cases += [(trained, not packed), (other, packed)]
    for dtype, documents in cases:
        name = str(dtype).removeprefix("torch.")
        try:
            T = examined_length(model.nsa, name, packed=documents, seq_len=seq_len if short else None)
            forward, backward, slots = compare(model, dtype, device="cuda", packed=documents, length=T)
        except Unsupported as reason:
            mend = "pick sizes that they run, or say model.backend=reference"
            return Finding("kernel parity", WARNING, f"the kernels do not run this model: {reason}", mend)
        # Each by itself: max() drops a NaN that does not come first.
        good = all(error <= TOLERANCE[name] for error in (forward, backward)) and slots >= SLOTS
        what = f"{name}, {T:,} tokens of {'packed documents' if documents else 'one document'}"
        told.append(f"{what}: forward {forward:.1e}, backward {backward:.1e}, {100 * slots:.3f}% of slots equal")
        worst = worst if good else FAILED
    mend = "" if worst == OK else "do not train on these kernels: use model.backend=reference, and report it"
    return Finding("kernel parity", worst, "; ".join(told), mend)


def examined_length(cfg: NSAConfig, precision: str, *, packed: bool, seq_len: int | None = None) -> int:
    """Tokens of a check: so many that selection has to choose, and in bf16 that the kernels of long documents run too.

    seq_len: of the run, where only its own kernels are wanted."""
    selected = cfg.select_count * cfg.select_block
    short = max(1024, (3 if packed else 2) * selected)
    # The selected branch takes another design where a tile's queries read more than about three times the blocks of
    # one, half a document on average. fp32's law of 1e-5 has been measured at the short length only.
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
    """(relative error of the output, the worst of any gradient, share of selected slots that are equal).

    What is not a number is infinitely wrong.
    """
    import torch

    from tercet.attention.dispatch import why_not_triton
    from tercet.attention.functional import nsa_attention

    cfg: NSAConfig = model.nsa
    T = length or examined_length(cfg, "float32", packed=packed)
    heads, groups, dk = model.heads, model.kv_heads, model.head_dim
    dv = model.value_dim or dk
    drawn = torch.Generator(device="cpu").manual_seed(1337)

    def tensor(*shape: int) -> Any:
        return torch.randn(*shape, generator=drawn).to(device, dtype).requires_grad_(True)

    names = ("q", "k_compressed", "v_compressed", "k_selected", "v_selected", "k_window", "v_window")
    compressed = cfg.num_compressed(T)
    inputs = [tensor(1, T, heads, dk)]
    for tokens in (compressed, T, T):
        inputs += [tensor(1, tokens, groups, dk), tensor(1, tokens, groups, dv)]
    gates = torch.rand(1, T, heads, 3, generator=drawn).to(device).requires_grad_(True)  # fp32, as the layer's are
    weight = torch.randn(1, T, heads, dv, generator=drawn).to(device, torch.float32)
    exact = [x.detach().float().requires_grad_(True) for x in (*inputs, gates)]
    bounds = longest = None
    if packed:  # one too short for a single compressed token, and two of which one has to choose
        first = min(cfg.compress_block - 1, T // 4)
        bounds = torch.tensor([0, first, first + T // 4, T], dtype=torch.int32, device=device)
        longest = T - first - T // 4  # given as every packed training step gives one

    if backend == "triton":
        reason = why_not_triton(dict(zip(names, inputs, strict=True)), cfg)
        if reason is not None:
            raise Unsupported(reason)

    def run(tensors: list[Any], backend: str, blocks: Any = None) -> tuple[Any, list[Any], Any]:
        named = dict(zip(names, tensors[:-1], strict=True))
        out, aux = nsa_attention(
            **named,
            gates=tensors[-1],
            config=cfg,
            cu_seqlens=bounds,
            max_seqlen=longest,
            backend=backend,
            return_aux=True,
            block_indices=blocks,
        )
        return out, list(torch.autograd.grad((out.float() * weight).sum(), tensors)), aux.block_indices

    expected, expected_grads, blocks = run(exact, "reference")
    got, grads, _ = run([*inputs, gates], backend, blocks)
    _, _, chosen = run([*inputs, gates], backend)
    real = blocks >= 0
    shared = ((blocks[..., :, None] == chosen[..., None, :]).any(-1) & real).sum()
    backward = max(_relative(a, b) for a, b in zip(grads, expected_grads, strict=True))
    return _relative(got, expected), backward, float(shared / real.sum())


def _relative(got: Any, expected: Any) -> float:
    got, expected = got.detach().double(), expected.detach().double()
    error = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
    return error if error == error else float("inf")
