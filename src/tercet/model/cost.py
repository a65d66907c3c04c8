"""Parameters, FLOPs and memory of a model, computed from its shapes. Does not import torch, so `tercet plan` is fast.

Parameters and query-key pairs are exact; activations are estimates. FLOPs count matmuls only, two per multiply-add.
"""

from __future__ import annotations

from dataclasses import dataclass

from tercet.attention.config import BRANCHES, SLOW_PLANES, NSAConfig
from tercet.model.config import ModelConfig

FP32 = 4
# fp32 logits that the loss holds at once: small compared to activations, large enough for fast matmuls.
LOGITS_BYTES = 1 << 28
# Most scratch of scattered selections: range_bytes of attention/kernels/table.py, which imports torch.
RANGE_BYTES = 1 << 31


@dataclass(frozen=True)
class Parameters:
    """Parameter counts; a tied head counts once, as embedding."""

    embedding: int
    attention: int
    ffn: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.ffn + self.norms + self.head


@dataclass(frozen=True)
class Pairs:
    """Query-key pairs of one head over one document, by branch."""

    compressed: int = 0
    selected: int = 0
    window: int = 0
    dense: int = 0

    @property
    def total(self) -> int:
        return self.compressed + self.selected + self.window + self.dense


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of a step, by purpose."""

    weights: int
    gradients: int
    optimizer: int
    compute_copies: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def parameters(model: ModelConfig) -> Parameters:
    """Exact parameter counts."""
    kinds = model.attention_kinds
    return Parameters(
        embedding=model.vocab_size * model.dim,
        attention=sum(attention_matrices(model, kind) + _attention_extras(model, kind) for kind in kinds),
        ffn=model.layers * 3 * model.dim * model.ffn_dim,
        norms=(2 * model.layers + 1) * model.dim,
        head=0 if model.tie_embeddings else model.vocab_size * model.dim,
    )


def attention_matrices(model: ModelConfig, kind: str) -> int:
    """Weights of one layer's projections, which multiply every token."""
    gates = model.dim * len(BRANCHES) * model.heads if model.spec(kind).gated else 0
    return _projections(model, kind) + gates + _selector_weights(model, kind)


def _projections(model: ModelConfig, kind: str) -> int:
    return model.dim * (model.heads * sum(_head_sizes(model)) + _kv_rows(model, kind))


def hidden_matrices(model: ModelConfig) -> int:
    """Weights that Muon updates (train/optim.py): the projections of attention and feed-forward layers."""
    attention = sum(_projections(model, kind) for kind in model.attention_kinds)
    return attention + model.layers * 3 * model.dim * model.ffn_dim


def optimizer_numbers(model: ModelConfig, optimizer: str, *, selectors_only: bool = False) -> int:
    """Numbers in the optimizer's state: AdamW has two moments per parameter, Muon has one."""
    if selectors_only:
        return 2 * selector_parameters(model)
    return 2 * parameters(model).total - (hidden_matrices(model) if optimizer == "muon" else 0)


def selector_parameters(model: ModelConfig) -> int:
    """Parameters of learned selectors."""
    return sum(_selector_weights(model, kind) for kind in model.attention_kinds)


def _selector_weights(model: ModelConfig, kind: str) -> int:
    learned = kind == "nsa" and model.selector == "learned"
    return 2 * model.dim * model.kv_heads * model.selector_dim if learned else 0


def compression_flops(model: ModelConfig, length: int) -> float:
    """FLOPs of φ over one document, for keys and values: l·D -> D per chunk of d tokens and KV head (a chunk is
    multiplied once for all its places in a block), D -> D per compressed token."""
    if model.compression == "mean" or not model.spec("nsa").reads_compressed:
        return 0.0
    compressed = model.nsa.num_compressed(length)
    chunks = length // model.nsa.compress_stride if compressed else 0
    squares = sum(2 * size * size for size in _head_sizes(model))
    return float(squares * model.kv_heads * (model.nsa.compress_block * chunks + compressed))


def attention_pairs(model: ModelConfig, kind: str, length: int) -> Pairs:
    """Exact pairs of one head of a layer of this kind: sums over t of num_cmp(t), of the selected tokens, and of
    min(w, t + 1). Queries below dense_below, and those of a dense layer, read everything."""
    spec, nsa = model.spec(kind), model.nsa
    if spec.dense:
        return Pairs(dense=window_pairs(length, length))
    early = min(spec.dense_below, length)
    counts = {
        "compressed": compressed_pairs(nsa, length),
        "selected": _selected_pairs(nsa, length) - _selected_pairs(nsa, early),
        "window": window_pairs(nsa.window, length),
    }
    return Pairs(**{branch: counts[branch] for branch in spec.branches}, dense=window_pairs(early, early))


def scoring_flops(model: ModelConfig, length: int) -> float:
    """FLOPs of scoring blocks in one layer, on average; there is no backward. 0 if every block is read, or if the
    probabilities of the compressed branch, which are computed anyway, are the scores."""
    nsa = model.nsa
    if length <= max(model.dense_below, nsa.selected_tokens):
        return 0.0
    if model.selector == "learned":  # a selector's queries times its keys in free blocks
        return 2.0 * model.kv_heads * model.selector_dim * _free_pairs(nsa, length)
    if model.selector == "own":  # in the groups that do not score exactly, queries times means of blocks
        channels = min(model.head_dim, 2 * SLOW_PLANES)
        layers = zip(model.attention_kinds, model.exact_groups, strict=False)
        groups = [len(exact) for kind, exact in layers if kind == "nsa"] or [model.kv_heads]
        exact = sum(groups) / len(groups) / model.kv_heads
        per_token = exact * channels + (1 - exact) * 2 * model.head_dim / nsa.select_block
        return 2.0 * model.heads * per_token * _free_pairs(nsa, length)
    if "compressed" in model.branches or not model.spec("nsa").reads_compressed:
        return 0.0
    # Without a compressed branch: queries times compressed keys, once for the log-sum-exp and once for the scores.
    return 4.0 * model.heads * model.head_dim * compressed_pairs(nsa, length)


def forward_flops(model: ModelConfig, length: int) -> float:
    """FLOPs of one document of `length` tokens, forward."""
    matrices = model.layers * 3 * model.dim * model.ffn_dim + model.vocab_size * model.dim
    attention_flops = 0.0
    for kind in model.attention_kinds:
        matrices += attention_matrices(model, kind)
        per_pair = 2 * model.heads * (model.head_dim + model.head_value_dim)
        attention_flops += per_pair * attention_pairs(model, kind, length).total
        if model.spec(kind).gated:
            attention_flops += compression_flops(model, length)
    return 2.0 * matrices * length + attention_flops + _all_scoring_flops(model, length)


def _all_scoring_flops(model: ModelConfig, length: int) -> float:
    return model.attention_kinds.count("nsa") * scoring_flops(model, length)


def flops_per_token(model: ModelConfig, seq_len: int, *, selectors_only: bool = False) -> float:
    """FLOPs per trained token: forward, plus twice that backward. Recomputation is not counted, as in MFU.

    selectors_only: the backward pass only goes through the loss, the output projections of sparse layers and the
    selectors' keys.
    """
    if selectors_only:
        outputs = model.attention_kinds.count("nsa") * model.dim * model.heads * model.head_value_dim
        keys = selector_parameters(model) // 2
        return forward_flops(model, seq_len) / seq_len + 2 * (model.vocab_size * model.dim + outputs + keys)
    return (3 * forward_flops(model, seq_len) - 2 * _all_scoring_flops(model, seq_len)) / seq_len


def memory(
    model: ModelConfig,
    tokens: int,
    length: int,
    *,
    compute_bytes: int,
    activation_checkpointing: str,
    weight_shards: int = 1,
    optimizer_shards: int = 1,
    optimizer: str = "adamw",
    selectors_only: bool = False,
) -> Memory:
    """Bytes on one device for one pass over `tokens` tokens, in documents of `length` tokens, with weights, gradients
    and optimizer state in fp32."""
    count = parameters(model).total
    trained = selector_parameters(model) if selectors_only else count
    per_token = activation_bytes_per_token(model, compute_bytes, activation_checkpointing)
    if selectors_only:
        per_token = _selector_bytes_per_token(model, compute_bytes)
    rows = min(tokens, chunk_rows(model.vocab_size))
    return Memory(
        weights=FP32 * count // weight_shards,
        gradients=FP32 * trained // optimizer_shards,
        optimizer=FP32 * optimizer_numbers(model, optimizer, selectors_only=selectors_only) // optimizer_shards,
        compute_copies=0 if compute_bytes == FP32 else compute_bytes * count // weight_shards,
        activations=tokens * per_token + _scattered_bytes(model, tokens, length, compute_bytes),
        loss=rows * model.vocab_size * (FP32 + compute_bytes)
        + tokens * model.dim * FP32
        + (0 if selectors_only else FP32 * model.vocab_size * model.dim),
    )


def activation_bytes_per_token(model: ModelConfig, compute_bytes: int, activation_checkpointing: str) -> int:
    """Estimated bytes per token that a forward pass saves for its backward pass, at the peak.

    A block saves its two residual inputs in fp32; inputs and outputs of matmuls in the compute dtype; and the branches'
    outputs, log-sum-exps, gates and block indices. With checkpointing, one block at a time is complete and the others
    save what their mode keeps.
    """
    recomputed = activation_checkpointing != "none"
    whole = [_block_bytes(model, kind, compute_bytes, recomputed=recomputed) for kind in model.attention_kinds]
    if not recomputed:
        return sum(whole)
    matmuls = activation_checkpointing == "selective"
    kept = [_checkpointed_block_bytes(model, kind, compute_bytes, matmuls) for kind in model.attention_kinds]
    return sum(kept) + max(whole)


def _scattered_bytes(model: ModelConfig, tokens: int, length: int, compute_bytes: int) -> int:
    """What the kernels' scratch for scattered selections adds to the peak: one partial result per query and block. It
    is taken after the block's feed-forward layer has freed its inputs.

    Short documents need none, since neighbouring queries select most blocks. fp32 is taken to run on a CPU, without
    these kernels."""
    nsa = model.nsa
    if "nsa" not in model.attention_kinds or compute_bytes == FP32 or length <= 2 * nsa.selected_tokens:
        return 0
    scratch = tokens * nsa.select_count * model.heads * model.head_value_dim * compute_bytes
    return max(0, min(scratch, RANGE_BYTES) - 2 * tokens * model.ffn_dim * compute_bytes)


def _selector_bytes_per_token(model: ModelConfig, compute_bytes: int) -> int:
    """What a forward pass saves to train selectors alone, their inputs and outputs, and one block that is computed."""
    kinds = model.attention_kinds
    saved = sum(model.dim + _selector_weights(model, kind) // model.dim for kind in kinds if kind == "nsa")
    return compute_bytes * saved + max(_block_bytes(model, kind, compute_bytes) for kind in kinds)


def chunk_rows(vocab_size: int) -> int:
    """Rows per chunk of the loss: fp32 logits fit in LOGITS_BYTES; a power of two, at least 256."""
    return max(256, 1 << (max(1, LOGITS_BYTES // (FP32 * vocab_size)).bit_length() - 1))


def _kv_rows(model: ModelConfig, kind: str) -> int:
    return model.kv_heads * sum(n * size for n, size in zip(model.spec(kind).kv_sets, _head_sizes(model), strict=True))


def _head_sizes(model: ModelConfig) -> tuple[int, int]:
    return model.head_dim, model.head_value_dim


def _attention_extras(model: ModelConfig, kind: str) -> int:
    """One layer's parameters besides its projections: QK norms, biases, φ with its positions."""
    extras = (1 + model.spec(kind).kv_sets[0]) * model.head_dim if model.qk_norm else 0
    if model.attention_bias:
        extras += model.heads * model.head_dim + _kv_rows(model, kind) + model.dim
    if not model.spec(kind).gated:
        return extras
    learned = model.compression == "mlp" and model.spec("nsa").reads_compressed
    block = model.nsa.compress_block
    phi = sum(block * d + (block * d + 1) * d + (d + 1) * d for d in _head_sizes(model)) if learned else 0
    return extras + len(BRANCHES) * model.heads + phi


def _projected(model: ModelConfig, kind: str) -> int:
    """Numbers per token in q and the branches' keys and values."""
    keys_and_values = model.spec(kind).kv_sets[1] * model.kv_heads * sum(_head_sizes(model))
    return model.heads * model.head_dim + keys_and_values


def _selection_bytes(model: ModelConfig, kind: str) -> int:
    return 4 * model.kv_heads * model.nsa.select_count if kind == "nsa" else 0


def _block_bytes(model: ModelConfig, kind: str, compute_bytes: int, *, recomputed: bool = False) -> int:
    """recomputed: by activation checkpointing."""
    gated = model.spec(kind).gated
    branches = len(model.branches) if gated else 0
    projected = _projected(model, kind)
    if kind == "nsa" and model.compression == "mean" and model.spec(kind).kv_sets[1] == len(BRANCHES):
        # The gradient of a mean needs no inputs: keys and values of the compressed branch are not saved.
        projected -= model.kv_heads * sum(_head_sizes(model))
    # Compiled (bf16, on GPUs), silu and the gated sum of the branches are recomputed in the backward pass; eager
    # PyTorch saves them. With activation checkpointing the block at work saves the sum too (`keep_sum` of the layer).
    compiled = compute_bytes < FP32
    keeps_sum = not gated or not compiled or recomputed
    outputs = (branches + keeps_sum) * model.heads * model.head_value_dim
    per_head = FP32 * model.heads * (2 * branches if gated else 1)
    ffn = (3 if compiled else 4) * model.ffn_dim
    selector = _selector_weights(model, kind) // model.dim
    computed = 2 * model.dim + projected + outputs + ffn + selector
    return 2 * FP32 * model.dim + compute_bytes * computed + per_head + _selection_bytes(model, kind)


def _checkpointed_block_bytes(model: ModelConfig, kind: str, compute_bytes: int, matmuls: bool) -> int:
    kept = FP32 * model.dim + _selection_bytes(model, kind)
    if matmuls:
        # Matmul outputs: keys shared by two branches count once.
        products = model.heads * model.head_dim + _kv_rows(model, kind) + 2 * model.dim + 2 * model.ffn_dim
        attention = (len(model.branches) if kind == "nsa" else 1) * model.heads * model.head_value_dim
        kept += compute_bytes * (products + attention)
    return kept


def _free_pairs(nsa: NSAConfig, length: int) -> int:
    """Sum over the queries that have to choose of the tokens before their last select_local blocks."""
    block = nsa.select_block
    return sum(
        min(block, length - c * block) * (c - nsa.select_local + 1) * block
        for c in range(nsa.select_count, -(-length // block))
    )


def compressed_pairs(nsa: NSAConfig, length: int) -> int:
    """Compressed tokens that the queries of one document see, in total."""
    # Σ over x = 0 … length - l of (x // d + 1), x = t + 1 - l.
    last = length - nsa.compress_block
    if last < 0:
        return 0
    whole, rest = divmod(last, nsa.compress_stride)
    return nsa.compress_stride * whole * (whole - 1) // 2 + whole * (rest + 1) + last + 1


def _selected_pairs(nsa: NSAConfig, length: int) -> int:
    # A query in block c reads min(n, c + 1) blocks: all complete except its own, which it reads up to itself.
    block, count = nsa.select_block, nsa.select_count
    blocks, rest = divmod(length, block)
    growing = min(blocks, count)
    earlier = growing * (growing - 1) // 2 + (blocks - growing) * (count - 1)
    whole = block * block * earlier + blocks * block * (block + 1) // 2
    return whole + rest * block * min(count - 1, blocks) + rest * (rest + 1) // 2


def window_pairs(window: int, length: int) -> int:
    """Σ min(window, t + 1) over the queries t of one document."""
    reach = min(window, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach
