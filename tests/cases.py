"""Inputs for the operator: random tensors, and configs and document splits for property tests."""

# q: [B, T, H, Dk]   kc, vc: [B, Tc, G, Dk|Dv]   ks, vs, kw, vw: [B, T, G, Dk|Dv]   gates: [B, T, H, 3]

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import oracle
import tercet

SMALL = {
    "compress_block": 4, "compress_stride": 2, "select_block": 4, "select_count": 4, "select_initial": 1,
    "select_local": 2, "window": 6,
}  # fmt: skip


def config(**changes: int) -> tercet.NSAConfig:
    """So small that T = 40 covers every case: empty compressed rows, omitted blocks, a full window."""
    return tercet.NSAConfig(**{**SMALL, **changes})


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    kc: Tensor
    vc: Tensor
    ks: Tensor
    vs: Tensor
    kw: Tensor
    vw: Tensor
    gates: Tensor

    def __repr__(self) -> str:
        return f"Inputs({', '.join(f'{f.name}={list(getattr(self, f.name).shape)}' for f in fields(self))})"

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))

    def map(self, change: Any) -> Inputs:
        return Inputs(*(change(x) for x in self.tensors()))

    def with_(self, **changes: Tensor) -> Inputs:
        return replace(self, **changes)

    def leaves(self) -> Inputs:
        return self.map(lambda x: x.detach().clone().requires_grad_())


def compressed_length(tokens: int, cfg: tercet.NSAConfig) -> int:
    return len(oracle.visible_compressed(tokens - 1, cfg.compress_block, cfg.compress_stride)) if tokens else 0


def inputs(
    cfg: tercet.NSAConfig,
    tokens: int,
    *,
    batch: int = 1,
    groups: int = 2,
    per_group: int = 2,
    key_size: int = 8,
    value_size: int = 6,
    documents: Sequence[int] | None = None,
    padding: int = 0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    sharpness: float = 1.5,
) -> Inputs:
    """Random inputs. With `documents` (lengths that sum to `tokens`), each has its own compressed tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    lengths = [tokens] if documents is None else list(documents)
    assert sum(lengths) == tokens
    short = sum(compressed_length(n, cfg) for n in lengths) + padding
    heads = groups * per_group
    return Inputs(
        normal(batch, tokens, heads, key_size) * sharpness,
        normal(batch, short, groups, key_size),
        normal(batch, short, groups, value_size),
        normal(batch, tokens, groups, key_size),
        normal(batch, tokens, groups, value_size),
        normal(batch, tokens, groups, key_size),
        normal(batch, tokens, groups, value_size),
        torch.rand((batch, tokens, heads, 3), generator=generator, dtype=torch.float64).to(dtype),
    )


def one_branch(x: Inputs, branch: int) -> Inputs:
    """Gate 1 on one branch (0 compressed, 1 selected, 2 window) and 0 on the others."""
    gates = torch.zeros_like(x.gates)
    gates[..., branch] = 1
    return x.with_(gates=gates)


def cu(documents: Sequence[int] | None) -> Tensor | None:
    if documents is None:
        return None
    return torch.tensor([0, *np.cumsum(documents).tolist()], dtype=torch.int32)


def attend(x: Inputs, cfg: tercet.NSAConfig, backend: str = "reference", **options: Any) -> Any:
    return tercet.nsa_attention(*x.tensors(), config=cfg, backend=backend, **options)


def judge(x: Inputs, cfg: tercet.NSAConfig, cu_seqlens: Any = None, block_indices: Any = None) -> oracle.Answer:
    arrays = [t.detach().double().numpy() for t in x.tensors()]
    given = None if block_indices is None else block_indices.numpy()
    return oracle.nsa(*arrays, cfg, cu_seqlens=cu_seqlens, block_indices=given)


def chosen(block_indices: Tensor, b: int, t: int, g: int) -> list[int]:
    return [j for j in block_indices[b, t, g].tolist() if j >= 0]


def wrong_sets(answer: oracle.Answer, block_indices: Tensor, relative: float) -> list[str]:
    """Every (batch, token, group) whose set is neither the oracle's nor a near-tie away from it."""
    return [
        f"b={b} t={t} g={g}: {chosen(block_indices, b, t, g)}, the oracle {s.chosen} from {s.scores}"
        for (b, t, g), s in answer.selections.items()
        if not s.accepts(chosen(block_indices, b, t, g), relative)
    ]


def assert_matches_oracle(case: Case, backend: str, *, near: float = 1e-9, error: float = 1e-10) -> None:
    """The operator selects and computes what the oracle does."""
    bounds = cu(case.documents)
    out, aux = attend(case.x, case.cfg, backend, cu_seqlens=bounds, return_aux=True)
    answer = judge(case.x, case.cfg, bounds, aux.block_indices)
    assert wrong_sets(answer, aux.block_indices, near) == []
    torch.testing.assert_close(out.double(), torch.from_numpy(answer.out), rtol=error, atol=error)


@st.composite
def configs(draw: st.DrawFn) -> tercet.NSAConfig:
    stride = draw(st.integers(1, 4))
    block = draw(st.integers(1, 4))
    initial = draw(st.integers(0, 2))
    local = draw(st.integers(1, 3))
    return tercet.NSAConfig(
        compress_block=stride * block,
        compress_stride=stride,
        select_block=stride * draw(st.integers(block, block + 3)),
        select_count=initial + local + draw(st.integers(0, 3)),
        select_initial=initial,
        select_local=local,
        window=draw(st.integers(1, 24)),
    )


@dataclass(frozen=True)
class Case:
    cfg: tercet.NSAConfig
    x: Inputs
    documents: tuple[int, ...] | None


@st.composite
def cases(draw: st.DrawFn, *, packed: bool | None = None, dtype: torch.dtype = torch.float64) -> Case:
    """A config with matching inputs: any length from 1, any heads per group, any Dk and Dv, packed or not."""
    cfg = draw(configs())
    if packed is None:
        packed = draw(st.booleans())
    lengths = st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any)
    documents = tuple(draw(lengths)) if packed else None
    x = inputs(
        cfg,
        sum(documents) if documents else draw(st.integers(1, 44)),
        batch=1 if packed else draw(st.integers(1, 2)),
        groups=draw(st.integers(1, 2)),
        per_group=draw(st.integers(1, 3)),
        key_size=draw(st.integers(1, 7)),
        value_size=draw(st.integers(1, 7)),
        documents=documents,
        padding=draw(st.integers(0, 3)) if packed else 0,
        dtype=dtype,
        seed=draw(st.integers(0, 2**20)),
    )
    return Case(cfg, x, documents)
