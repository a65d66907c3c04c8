"""The update: learning-rate schedule, AdamW or Muon with decay groups, and clipping by the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr

from tercet.config.sections import TrainConfig
from tercet.model.attention import Attention
from tercet.model.transformer import SwiGLU


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of update number `step`, counted from 1. A pure function: resuming needs no schedule state."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    floor = config.lr * config.min_lr_ratio
    if config.schedule == "cosine":
        done = _fraction(step, config.warmup_steps, config.steps)
        return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * done))
    # wsd: the decay must not start during warm-up
    start = max(config.warmup_steps, config.steps - round(config.decay_ratio * config.steps))
    return config.lr + (floor - config.lr) * _fraction(step, start, config.steps)


def _fraction(step: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Fused AdamW, or MuonAdamW. AdamW decays matrices, not norms, biases and other 1-D parameters.

    Embeddings and φ's position embeddings (`compress_*.position`) count as matrices: exempting them now would change
    the updates of resumed runs.
    """
    hidden = hidden_matrices(model) if config.optimizer == "muon" else {}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    selectors = [p for name, p in named if ".selector." in name]
    trained = [p for name, p in named if ".selector." not in name and p not in hidden]
    selector_lr = config.selector.lr or config.lr
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        # the extra keys are for `update`
        {"params": selectors, "weight_decay": 0.01, "lr_factor": selector_lr / config.lr, "clip": 1.0},
    ]
    used = [group for group in groups if group["params"]]
    adamw = torch.optim.AdamW(used, lr=config.lr, betas=config.betas, fused=True)
    return MuonAdamW(adamw, _build_muon(hidden, config)) if hidden else adamw


def hidden_matrices(model: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """The matrices that Muon updates, with the rows of the parts that are one matrix each: a fused projection stacks
    several."""
    found: dict[Tensor, tuple[int, ...]] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            found[module.kv_proj.weight] = module.kv_rows
            wholes = [module.q_proj, module.o_proj]
        elif isinstance(module, SwiGLU):
            found[module.gate_up.weight] = (module.gate_up.out_features // 2,) * 2
            wholes = [module.down]
        else:
            continue
        found |= {linear.weight: (linear.out_features,) for linear in wholes}
    return {matrix: parts for matrix, parts in found.items() if matrix.requires_grad}


def _build_muon(hidden: dict[Tensor, tuple[int, ...]], config: TrainConfig) -> torch.optim.Muon:
    """torch's Muon with one group for each shape of a matrix and way to split it: its learning rate depends on both."""
    factor = (config.muon.lr or config.lr) / config.lr
    groups: dict[tuple[tuple[int, ...], int], dict[str, Any]] = {}
    for matrix, parts in hidden.items():
        group = groups.setdefault((parts, matrix.shape[1]), {"params": [], "parts": parts, "lr_factor": factor})
        group["params"].append(matrix)
    options: Any = {"lr": config.lr, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    return torch.optim.Muon(list(groups.values()), **options)


class MuonAdamW(torch.optim.Optimizer):
    """torch's AdamW and Muon as one optimizer, with one state.

    torch.optim.Muon orthogonalises one parameter at a time, as a whole, shards included, and cannot skip a step. Here
    the same update is computed for many matrices at once: the parts of fused projections, gathered from their shards;
    with `found_inf` as in the fused AdamW.
    """

    found_inf: Tensor | None = None

    def __init__(self, adamw: torch.optim.AdamW, matrices: torch.optim.Muon) -> None:
        self._adamw = adamw
        super().__init__([*adamw.param_groups, *matrices.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:  # called by load_state_dict
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if "parts" not in group]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        skip = None if self.found_inf is None else self.found_inf > 0
        for group in self.param_groups:
            if "parts" not in group:
                continue
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            if matrices:
                together = max(1, _MOST_TOGETHER // matrices[0].numel())
                for first in range(0, len(matrices), together):
                    self._update_matrices(matrices[first : first + together], group, skip)

    def _update_matrices(self, matrices: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        beta, lr = group["momentum"], group["lr"]
        changed, updates = [], []  # pairs of local tensors, old and new; whole updates
        for matrix in matrices:
            state, gradient = self.state[matrix], matrix.grad
            assert gradient is not None
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            momentum = state["momentum_buffer"].lerp(gradient, 1 - beta)
            changed.append((_local(state["momentum_buffer"]), _local(momentum)))
            updates.append(_whole(gradient.lerp(momentum, beta) if group["nesterov"] else momentum))
        rate = _adjust_lr(lr, group["adjust_lr_fn"], torch.Size((group["parts"][0], matrices[0].shape[1])))
        for matrix, update in zip(matrices, _orthogonalize_parts(updates, group), strict=True):
            own, own_update = own_shard(matrix, update)
            changed.append((own, (own * (1 - lr * group["weight_decay"])).add_(own_update, alpha=-rate)))
        for old, new in changed:
            old.copy_(new if skip is None else torch.where(skip, old, new))


_MOST_TOGETHER = 1 << 25  # numbers in the matrices that Muon updates together, which take about 20 bytes each


def _orthogonalize_parts(updates: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """The updates with each part orthogonalised, and scaled if its learning rate differs from that of the first."""
    parts = [part for update in updates for part in update.split(group["parts"])]
    found = list(parts)
    for shape in dict.fromkeys(part.shape for part in parts):
        alike = [i for i, part in enumerate(parts) if part.shape == shape]
        batch = torch.stack([parts[i].bfloat16() for i in alike])
        batch = orthogonalize(batch, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate, first = (_adjust_lr(1.0, group["adjust_lr_fn"], size) for size in (shape, parts[0].shape))
        for i, part in zip(alike, batch if rate == first else batch.float() * (rate / first), strict=True):
            found[i] = part
    count = len(group["parts"])
    return found if count == 1 else [torch.cat(found[i : i + count]) for i in range(0, len(found), count)]


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """torch.optim.Muon's Newton-Schulz iteration, of a batch of bf16 matrices [N, rows, columns]."""
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_shard(sharded: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's shard of a tensor, and the same shard of its new value."""
    if not isinstance(sharded, DTensor):
        return sharded, whole
    # src_data_rank=None: every rank has the same values, so nothing is sent
    new = distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return sharded.to_local(), new.to_local()


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of all current gradients together, on their device. [] fp32"""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def muon_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> float | None:
    """Muon's learning rate where AdamW's is `lr`; None without Muon."""
    return next((lr * group["lr_factor"] for group in optimizer.param_groups if "parts" in group), None)


def selector_group(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The parameters of learned selectors, which have their own clipping and learning rate; None if there are none."""
    return next((group for group in optimizer.param_groups if "clip" in group), None)


def gradient_norms(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor | None]:
    """`global_norm` of the model without its learned selectors, and of these; None if there are none. If nothing but
    selectors is trained, both are theirs."""
    selectors = selector_group(optimizer)
    separate = set() if selectors is None else {id(p) for p in selectors["params"]}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in separate]
    if selectors is None:
        return global_norm(others), None
    selector_norm = global_norm(selectors["params"])
    return global_norm(others) if others else selector_norm, selector_norm


def update(
    optimizer: torch.optim.Optimizer, lr: float, clip: float, norm: Tensor, skip: Tensor,
    selector_norm: Tensor | None = None,
) -> None:  # fmt: skip
    """Clip, update at rate `lr`, clear the gradients. If `skip` (bool on the device), weights and moments stay.

    The optimizer reads `found_inf` on the device, as with a GradScaler, so the host does not wait. Zeroing the
    gradients instead would still change the moments and apply weight decay.
    """
    selectors = selector_group(optimizer)
    others = [group for group in optimizer.param_groups if group is not selectors]
    clipped = [(others, clip, norm)]
    if selectors is not None and selector_norm is not None:
        clipped.append(([selectors], selectors["clip"], selector_norm))
    for groups, most, found in clipped:
        if most > 0:
            parameters = [p for group in groups for p in group["params"] if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(parameters, most, found, foreach=True)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
    optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
