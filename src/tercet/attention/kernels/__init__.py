"""The operator as GPU kernels, forward and backward, in Triton and Gluon. Imported only where Triton is installed.

Start with docs/kernels.md: from the paper's equations to the kernels. `table.py` says which kernel runs when.

Conventions, for all modules:

- Axes: B batch, T tokens, H query heads, G KV heads (groups), h = H/G heads per group, Dk and Dv head sizes, n selected
  blocks per query. Tensors are [B, T, heads, size]. Rows are flat: token t of sequence b is row b·T + t.
- Log-sum-exp: fp32, base 2, of logits times Dk^-½. A row that sees no key has +inf (its output is 0, and p = 0 in the
  backward); partial results of a decode step, which are summed, have -inf. Values per (query, head) row (log-sum-exp,
  delta, gate) have shape [H, B, T] in the compressed and window branch and [B, T, H] in the selected branch, after the
  order in which their tiles read them: `combine.row_shape`.
- delta = dout · o of a branch, before its gate; gate · dout is the gradient of the branch's output.
- Argument order: q, k, v, other tensors, config, documents, launch settings. Kernels: pointers, numbers, constants. A
  pointer is upper case; numbers that change from batch to batch are declared do_not_specialize.
- Kernels never use atomics for results, so that results are bitwise reproducible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.attention import layout as _layout  # noqa: F401  registers tercet::keep_selection
from tercet.attention.config import NSAConfig, unsupported_sizes
from tercet.attention.hardware import KERNEL_DTYPES, OLDEST_CAPABILITY, capability, interpreting
from tercet.attention.kernels import qkv_split as _qkv_split  # noqa: F401  registers tercet::heads_apart
from tercet.attention.kernels.autograd import attend, select_by_keys, select_by_tokens
from tercet.attention.kernels.table import block_parts, shared_memory, too_large

__all__ = ["attend", "select_by_keys", "select_by_tokens", "unsupported"]


def unsupported(
    q: Tensor,
    k_compressed: Tensor | None = None,
    v_compressed: Tensor | None = None,
    k_selected: Tensor | None = None,
    v_selected: Tensor | None = None,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    *,
    config: NSAConfig,
) -> str | None:
    """Why the kernels cannot run this call; None if they can."""
    keys = [x for x in (k_compressed, k_selected, k_window) if x is not None]
    values = [x for x in (v_compressed, v_selected, v_window) if x is not None]
    if q.device.type != "cuda" and not interpreting():
        return f"the kernels need a CUDA device: q is on {q.device.type}"
    if q.device.type == "cuda" and capability(q.device) < OLDEST_CAPABILITY:
        return f"the kernels need compute capability 8.0: {torch.cuda.get_device_name(q.device)} is older"
    if q.dtype not in KERNEL_DTYPES or any(x.dtype != q.dtype for x in keys + values):
        found = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in [q, *keys, *values]}))
        return f"q, k and v must share one of bfloat16, float16, float32: got {found}"
    if q.device.type != "cuda" and q.dtype == torch.bfloat16:
        return "q is bfloat16 and Triton's interpreter gives wrong products of it: use float16 or float32"
    if (reason := unsupported_sizes(config)) is not None:
        return reason
    for name, x in (("Dk", q), *(("Dv", v) for v in values[:1])):
        if x.shape[-1] > 256:
            return f"{name}={x.shape[-1]} is more than 256"
    if any(v.shape[-1] != values[0].shape[-1] for v in values):
        return "the branches' values differ in size"
    if k_selected is not None and v_selected is not None:
        sizes = q.shape[-1], v_selected.shape[-1]
        if (reason := too_large(shared_memory(q.device), q.dtype, *sizes, config.select_block)) is not None:
            return reason
    heads = q.shape[2] // max(1, keys[0].shape[2]) if keys else 1
    if heads > 128:
        return f"{heads} heads per group are more than 128"
    groups = keys[0].shape[2] if keys else 1
    entries = q.shape[0] * q.shape[1] * groups * config.select_count * block_parts(config)
    if entries >= 2**31:
        return f"B·T·G·n = {entries} is 2^31 or more"
    return None
