"""The attention layers by name: each builds the AttentionSpec of one form, and is an Attention."""

from __future__ import annotations

from typing import Any

from tercet.attention.config import BRANCHES, NSAConfig
from tercet.attention.spec import DENSE, AttentionSpec, block_sparse, window
from tercet.model.attention import Attention
from tercet.model.config import NSA_ONLY, RopeConfig
from tercet.model.rope import Rotary


class _Layer(Attention):
    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None,
        spec: AttentionSpec,
        *,
        rope_theta: float = 10000.0,
        rope_scaling: float = 1.0,
        rope_max_wavelength: float = 0.0,
        rope: RopeConfig | None = None,
        **options: Any,
    ) -> None:
        rotary = Rotary(head_dim, rope_theta, rope_scaling, rope_max_wavelength, rope)
        super().__init__(dim, heads, kv_heads, head_dim, value_dim, spec=spec, rotary=rotary, **options)


class NativeSparseAttention(_Layer):
    """Each query attends to compressed tokens, to a few selected blocks in full, and to a sliding window.

    dim, heads, kv_heads, head_dim   sizes; value_dim is the head size of v, head_dim by default
    config       sizes of the three branches
    compression  φ: "mlp" (learnable, equals the mean at initialisation) or "mean"
    gate         "sigmoid" (the paper's) or "softmax" over the branches
    shared_kv    one K/V projection for all branches instead of three
    compress_selected_keys  compress the selected branch's keys instead of separate ones, so that blocks are selected by
                 a summary of the keys that will be read
    selector     what chooses the blocks: "compressed" (the compressed branch, as in the paper), "own" (the selected
                 branch's queries and keys) or "learned" (a query and a key of `selector_dim` channels per token and KV
                 head, of which RoPE rotates the first `selector_rotary`, half of them by default)
    exact_groups with selector="own": the KV heads that choose by it; the others choose by the means of their blocks
    branches     omit branches. Without the compressed one, and with a selector other than "compressed", the layer has
                 no keys, values and φ for compressed tokens
    rope_theta, rope_scaling, rope_max_wavelength  RoPE base, a divisor for all positions, and the longest wavelength
                 of rotated channels (0: no limit)
    rope         which channels rope_scaling applies to; all by default
    qk_norm      RMS-normalise each head of q and k; norm_eps: epsilon of these norms
    backend      "auto", "reference" or "triton"
    bias         biases in the projections
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        config: NSAConfig | None = None,
        *,
        compression: str = "mlp",
        gate: str = "sigmoid",
        shared_kv: bool = False,
        compress_selected_keys: bool = False,
        branches: tuple[str, ...] = BRANCHES,
        selector: str = "compressed",
        exact_groups: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        blocks = NSAConfig() if config is None else config
        spec = AttentionSpec(
            blocks, branches, gate, selector, compression, shared_kv, compress_selected_keys, exact_groups=exact_groups
        )
        super().__init__(dim, heads, kv_heads, head_dim, value_dim, spec, **options)


class BlockSparseAttention(_Layer):
    """Dense attention's parameters; each query reads a few blocks of the past in full (docs/nsa.md, "Block-sparse
    mode"). Other arguments are NativeSparseAttention's.

    config       block sizes; `window` has no effect
    dense_below  queries at positions below this read everything
    selector     what scores the blocks: "compressed" (means of their keys), "own" or "learned"
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        config: NSAConfig | None = None,
        *,
        dense_below: int = 0,
        selector: str = "compressed",
        exact_groups: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        spec = block_sparse(NSAConfig() if config is None else config, selector, dense_below, exact_groups)
        super().__init__(dim, heads, kv_heads, head_dim, value_dim, spec, **_without(options, selects=True))


class WindowAttention(_Layer):
    """The window branch of NativeSparseAttention without the others: each query sees the last config.window tokens,
    itself included. One set of keys and values, no gate, no compression, no selection; its cache has constant size.

    The weights are those of a DenseAttention of the same sizes.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        config: NSAConfig | None = None,
        **options: Any,
    ) -> None:
        spec = window(NSAConfig() if config is None else config)
        super().__init__(dim, heads, kv_heads, head_dim, value_dim, spec, **_without(options))


class DenseAttention(_Layer):
    """The dense baseline: takes NativeSparseAttention's arguments and ignores those that only apply to it."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        config: NSAConfig | None = None,
        **options: Any,
    ) -> None:
        options.pop("backend", None)
        super().__init__(dim, heads, kv_heads, head_dim, value_dim, DENSE, **_without(options))


def build_layer(spec: AttentionSpec, *sizes: Any, **options: Any) -> Attention:
    """A layer of any form, as an instance of its class above."""
    ungated = {"selected": BlockSparseAttention, "window": WindowAttention, "dense": DenseAttention}
    kind: type[_Layer] = NativeSparseAttention if spec.gated else ungated[spec.branches[0]]
    layer = kind.__new__(kind)
    Attention.__init__(layer, *sizes, spec=spec, **options)
    return layer


def _without(options: dict[str, Any], *, selects: bool = False) -> dict[str, Any]:
    """Options without those that only NativeSparseAttention has."""
    keep = {"selector_dim", "selector_rotary"} if selects else set()
    left_out = {*NSA_ONLY} - {"nsa", *keep}  # "nsa" is `config` here
    return {name: value for name, value in options.items() if name not in left_out}
