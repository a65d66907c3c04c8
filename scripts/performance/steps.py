"""Tables about whole training steps, and about linear layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from performance.results import Row, first, number, pair, paragraph, ratio, rows, table, thousands, tokens
from tercet.bench.train import compared
from tercet.config.load import load


def batches() -> str:
    """Empty if not measured."""
    found = [row for row in rows("batches") if row.get("outcome") == "ok"]
    lines, spread = [], 0.0
    for size in sorted({row["batch"] for row in found}):
        modes = {row["flags"].get("train.cuda_graph"): row for row in found if row["batch"] == size}
        if modes.keys() != {"off", "on"}:
            continue
        off, on = modes["off"], modes["on"]
        spread = max(spread, off["spread"])
        lines.append(
            [
                str(size),
                *(f"{thousands(row.get('tokens_per_s'))} ({number(row.get('ms'))} ms)" for row in (off, on)),
                pair(off.get("peak_gib"), on.get("peak_gib")),
            ]
        )
    if not lines:
        return ""
    about = paragraph(
        "**Small batches** are bound by launch overhead. A CUDA graph (`train.cuda_graph`) removes it (`m7c`, "
        f"sequences of 2,048; eager times depend on the host, and repeated timings here differ by up to {spread:.0%}):"
    )
    head = ["sequences per step", "eager, tokens/s", "CUDA graph, tokens/s", "GiB, eager / graph"]
    return "\n\n".join([about, table(head, lines)])


def million() -> str:
    row = first(rows("million"))
    if row.get("outcome") != "ok":
        return ""
    return paragraph(
        f"One training step of `m7c` on a single sequence of {row['length']:,} tokens takes {row['ms'] / 1e3:.1f} s "
        f"and {row['peak_gib']:.1f} GiB on one GPU (full activation checkpointing, without torch.compile; a first "
        "step, with the time to compile its kernels)."
    )


def large() -> str:
    """Empty if not measured."""
    check = first([row for row in rows("large") if "parity" in row])
    lines = []
    for nsa in rows("large", kind="nsa"):
        dense = first(rows("large", preset=f"{nsa['preset']}-dense"))
        both = [cell if cell.get("outcome") == "ok" else {} for cell in (nsa, dense)]
        times = compared([nsa, dense], check.get("correct"))[0]["times_dense"] if all(both) else None
        lines.append(
            [
                f"`{nsa['preset']}`",
                tokens(nsa["length"]),
                *(thousands(cell.get("tokens_per_s")) if cell else "failed" for cell in both),
                f"**{ratio(times)}**",
                pair(*(cell.get("ms") for cell in both)),
                pair(*(cell.get("peak_gib") for cell in both)),
            ]
        )
    if not lines:
        return ""
    head = ["preset", "length", "NSA, tokens/s", "dense, tokens/s", "× dense", "ms", "GiB"]
    about = paragraph(
        "Presets as they are, without learned selectors; 65,536 tokens per step, no activation checkpointing. Pairs "
        "are NSA / dense. GiB: peak memory ([beside its estimate](gpus.md))."
    )
    return "\n\n".join(["### Larger models", about, table(head, lines), *_large_two_branch()])


def _large_two_branch() -> list[str]:
    sparse, dense = (first(rows("two-branch", kind=kind, outcome="ok")) for kind in ("nsa", "dense"))
    check = first([row for row in rows("two-branch") if "parity" in row])
    if not (sparse and dense):
        return []
    times = compared([sparse, dense], check.get("correct"))[0]["times_dense"]
    return [
        paragraph(
            "At 8k the larger projection of NSA [costs what its attention "
            "saves](lab-notes/training-step.md#why-does-1b-gain-nothing-at-8k). With two branches and learned "
            f"selectors `{sparse['preset']}` is faster: {thousands(sparse['tokens_per_s'])} tokens/s at "
            f"{tokens(sparse['length'])}, **{ratio(times)}×** dense in the same run, with {sparse['peak_gib']:.1f} GiB."
        )
    ]


def blocks() -> str:
    """Empty if not measured."""
    found = [row for row in rows("blocks") if row.get("outcome") == "ok"]
    others = [size for size in (32, 128) if any(row["select_block"] == size for row in found)]
    lines = []
    for length in sorted({row["length"] for row in found}):
        speeds = {row["select_block"]: row["tokens_per_s"] for row in found if row["length"] == length}
        usual = speeds.get(64)
        lines.append(
            [
                tokens(length),
                *(thousands(speeds.get(size)) for size in (64, *others)),
                *(ratio(speeds[size] / usual if usual and size in speeds else None) for size in others),
            ]
        )
    if not lines:
        return ""
    head = ["length", "64 tokens, tokens/s"]
    head += [*(f"{size} tokens" for size in others), *(f"{size}, × 64" for size in others)]
    intro = "**Sizes of blocks**: NSA (`m7c`, learned selectors) that selects 1,024 tokens per query:"
    return f"{intro}\n\n{table(head, lines)}"


def fp8() -> str:
    """Empty if not measured."""
    found = rows("fp8")
    if not found:
        return ""
    lines = [
        [
            row["layer"],
            f"{row['inputs']:,} → {row['outputs']:,}",
            f"{number(row['bf16_ms'])} ({number(row['bf16_tflops'])})",
            *(
                ratio(row["bf16_ms"] / row[f"{name}_ms"] if f"{name}_ms" in row else None)
                for name in ("tensor", "tensor_matmul", "row", "row_matmul")
            ),
            " / ".join(f"{row[key]:.1%}" if key in row else "–" for key in ("tensor_error", "row_error")),
        ]
        for row in found
    ]
    head = ["layer", "size", "bf16, ms (TFLOP/s)", "tensor, × bf16", "matmul", "row, × bf16", "matmul", "error"]
    about = paragraph(
        "One linear layer of each shape of `1b`, forward + backward on 65,536 tokens, in float8 with one scale per "
        "tensor or per row against bf16: with casts, and the matrix products alone. Error: of outputs and gradients "
        "against bf16, per tensor / per row. Tercet trains in bf16; this is what FP8 could save."
    )
    sections = ["### FP8 linear layers", about, table(head, lines), _fp8_saving(found)]
    return "\n\n".join(section for section in sections if section)


def _fp8_saving(found: Sequence[Row]) -> str:
    """What the faster scaling of each layer would save of a training step of the same preset."""
    preset = found[0]["preset"]
    step = first(rows("large", preset=preset))
    if step.get("outcome") != "ok":
        return ""
    saved = 0.0
    for row in found:
        scaled = min((row[key] for key in ("tensor_ms", "row_ms") if key in row), default=row["bf16_ms"])
        saved += max(0.0, row["bf16_ms"] - scaled)
    saved *= load(preset=preset).config.model.layers
    return paragraph(
        f"In all layers together the faster scaling saves {number(saved)} of the {number(step['ms'])} ms of a step of "
        f"`{preset}` at {tokens(step['length'])}: {saved / step['ms']:.0%}."
    )


# Kernel names, first match wins. Inductor's kernels are named triton_poi…, triton_red…, triton_per….
GROUPS = (
    ("dense attention", r"cudnn|fmha|flash"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|splitK"),
    ("optimizer, gradient norm", r"multi_tensor|adam|foreach|lpnorm|norm_kernel"),
    ("elementwise, norms, SwiGLU, loss", r"^triton_|swiglu|^_gradient$"),
    ("copies, sorts, other PyTorch kernels", r"^void |at::|cub|Mem(cpy|set)|memcpy|memset"),
    ("NSA, selected branch", r"query_major|kv_major|selected|partials|sum_dq|sum_dkv|_lists|sort_keys|choose_design"),
    ("NSA, compressed and window branches", r"compressed|window|hopper_(forward|dkv|dq)"),
    ("NSA, scores and block selection", r"score|select|shortlist"),
    ("NSA, gates, delta, QKV split", r""),
)


def group(kernel: str) -> str:
    return next(name for name, pattern in GROUPS if re.search(pattern, kernel, re.IGNORECASE))


def step_kernels() -> str:
    cells = [
        (length, kind, first(rows("kernels", of="step", kind=kind, length=length)).get("kernels", []))
        for length in (2048, 8192, 65536)
        for kind in ("nsa", "dense")
    ]
    cells = [cell for cell in cells if cell[2]]
    sums = [{name: 0.0 for name, _ in GROUPS} for _ in cells]
    for total, (_, _, kernels) in zip(sums, cells, strict=True):
        for kernel in kernels:
            total[group(kernel["kernel"])] += kernel["ms"]
    names = [name for name, _ in GROUPS if any(total[name] > 0 for total in sums)]
    names.sort(key=lambda name: -max(total[name] for total in sums))
    lines = [[name, *(number(total[name]) if total[name] else "–" for total in sums)] for name in names]
    lines.append(["sum, ms", *(number(sum(total.values())) for total in sums)] if cells else [])
    launches = (sum(kernel["launches"] for kernel in kernels) for _, _, kernels in cells)
    lines.append(["kernel launches", *(f"{count:,}" for count in launches)] if cells else [])
    label = {"nsa": "NSA", "dense": "dense"}
    return table(["kernels", *(f"{tokens(n)}, {label[kind]}" for n, kind, _ in cells)], lines if cells else [])
