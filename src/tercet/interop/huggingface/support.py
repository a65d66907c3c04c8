"""Which models attn_implementation="tercet" serves, and with which settings.

Models are judged by the code of their attention layers, not by a list. Settings are the entry `tercet` of config.json.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tercet.attention.config import NSAConfig
from tercet.attention.selector import Ranges, slow_channels
from tercet.attention.spec import SCORERS, AttentionSpec, block_sparse
from tercet.errors import UsageError
from tercet.model.config import ModelConfig
from tercet.parse import first_problem

NAME = "tercet"
# Fields of config.json -> ours.
NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "tie_word_embeddings": "tie_embeddings",
}
DEFAULTS = {"gate": "none", "selector": "own"}
SCORE_CHANNELS = 32
LOCAL = ("sliding_attention", "chunked_attention")
# what models pass to their attention function, and we do not compute
_UNSUPPORTED = {
    "softcap": "soft-capping",
    "s_aux": "attention sinks",
    "position_bias": "position biases",
    "indices": "its own choice of single tokens",
    "cache": "paged caches",
}
_KNOWN = {
    "attention_mask", "dropout", "scaling", "sliding_window", "position_ids", "output_attentions", "block_indices",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "is_causal",
}  # fmt: skip


class UnsupportedError(UsageError):
    """A model or an argument that attn_implementation="tercet" does not compute."""


def unsupported(what: str, fix: str) -> UnsupportedError:
    return UnsupportedError(f'{what} is not supported by attn_implementation="{NAME}": {fix}')


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise for an argument of the attention function that we do not compute."""
    for name, meaning in _UNSUPPORTED.items():
        if arguments.get(name) is not None:
            raise unsupported(f"{name} ({meaning})", "use eager")


class Forward(NamedTuple):
    """What an attention layer's forward method says."""

    arguments: dict[str, ast.expr]
    """Keyword arguments for the attention function."""
    rotations: list[ast.AST | None]
    """Calls that rotate q and k: the condition of each, None if there is none."""


@cache
def read_forward(layer: Any) -> Forward | None:
    """Of a class of layers; None if it does not call transformers' attention functions, or its code cannot be read."""
    try:
        source = textwrap.dedent(inspect.getsource(layer.forward))
    except (OSError, TypeError):
        return None
    if "ALL_ATTENTION_FUNCTIONS" not in source:
        return None
    arguments, rotations = dict[str, ast.expr](), list[ast.AST | None]()

    def visit(node: ast.AST, condition: ast.AST | None) -> None:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name == "attention_interface":
                arguments.update({word.arg: word.value for word in node.keywords if word.arg})
            elif "rot" in name or "rope" in name:
                rotations.append(condition)
        for child in ast.iter_child_nodes(node):
            within = condition
            if isinstance(node, ast.If) and child is not node.test:  # nested or else: only that there is one
                within = node.test if condition is None and child in node.body else node
            visit(child, within)

    visit(ast.parse(source), None)
    return Forward(arguments, rotations)


def _value(expression: ast.AST, layer: nn.Module) -> Any:
    """Of a constant or self.name; the expression itself if it is anything else."""
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.Attribute) and ast.unparse(expression.value) == "self":
        return getattr(layer, expression.attr, None)
    return expression


def attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Forward]]:
    for name, layer in model.named_modules():
        kind: Any = type(layer)
        if (forward := read_forward(kind)) is not None:
            yield name, layer, forward


def is_local(layer: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether a layer has a sliding window or chunks, and so stays as it is."""
    kinds, index = getattr(layer.config, "layer_types", None), getattr(layer, "layer_idx", None)
    return arguments.get("sliding_window") is not None or bool(kinds and index is not None and kinds[index] in LOCAL)


def check_config(config: PreTrainedConfig) -> None:
    """Raise for a configuration that makes attention bidirectional, or local in every layer."""
    name = f"model_type={config.model_type!r} with "
    for word, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
        if bool(value := getattr(config, word, causal)) != causal:
            raise unsupported(f"{name}{word}={value}", "only causal attention is; use sdpa")
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if window is not None and (kinds is None or all(kind in LOCAL for kind in kinds)):
        fix = "load the model with sliding_window=None, which lets its layers read the whole context"
        raise unsupported(
            f"{name}sliding_window={window} in every layer", fix if kinds is None else "no layer reads everything"
        )


def check_model(model: PreTrainedModel) -> None:
    """Raise if block-sparse attention does not compute what the model needs, and note how its layers rotate."""
    name = f"model_type={model.config.model_type!r}"
    check_config(model.config)
    layers = list(attention_layers(model))
    if not layers or not model._can_set_attn_implementation():
        raise unsupported(name, "its layers do not call transformers' attention functions (AttentionInterface)")
    sizes = {2 * len(x) for buffer, x in model.named_buffers() if buffer.endswith("inv_freq")}
    for place, layer, forward in layers:
        given = {word: _value(expression, layer) for word, expression in forward.arguments.items()}
        if given.get("is_causal") is False or getattr(layer, "is_causal", True) is False:
            raise unsupported(
                f"{name} with bidirectional or cross-attention ({place})", "only causal self-attention is; use sdpa"
            )
        for word, value in given.items():
            if value is not None and word not in _KNOWN:
                raise unsupported(f"{name} with {word} ({_UNSUPPORTED.get(word, 'unknown')})", "use eager")
        whole = sizes == {getattr(layer, "head_dim", None)}
        layer.tercet_rotation = _rotation(layer, forward) if whole else None  # type: ignore[assignment]


def _rotation(layer: nn.Module, forward: Forward) -> str | None:
    """How RoPE pairs the channels of a head: "half" (i with i + size/2) or "pairs" (neighbours). None: it does not
    rotate, or not all of them, or in a way that we cannot read."""
    if len(forward.rotations) != 1:
        return None
    condition = forward.rotations[0]
    if condition is not None and _value(condition, layer) not in (True, 1):
        return None
    rotate = getattr(sys.modules.get(type(layer).__module__), "rotate_half", None)
    if rotate is None:
        return None
    found = rotate(torch.arange(1, 5, device="cpu")).abs().tolist()
    return {(3, 4, 1, 2): "half", (2, 1, 4, 3): "pairs"}.get(tuple(found))


def check_when_loading() -> None:
    """Check a model when transformers builds it for NAME, or switches it to NAME, not in its first forward pass."""

    def checked(method: Any) -> Any:
        @wraps(method)
        def run(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            chosen = self.config._attn_implementation if method.__name__ == "post_init" else result
            # a model without layers is being built; other code for its attention may fail before it is complete
            built = any(self.children())
            if chosen == NAME != self.config.model_type and (built or not self._can_set_attn_implementation()):
                check_model(self)
            return result

        return run

    for name in ("post_init", "get_correct_attn_implementation"):
        method = getattr(PreTrainedModel, name)
        if not hasattr(method, "__wrapped__"):
            setattr(PreTrainedModel, name, checked(method))


# ------------------------------------------------------------ settings


def use_block_sparse(
    model: PreTrainedModel,
    config: NSAConfig | None = None,
    *,
    scorer: str = "own",
    score_channels: int | str | None = None,
    layers: Sequence[int] | None = None,
    dense_below: int = 0,
    exact_groups: Sequence[Sequence[int]] = (),
) -> None:
    """Let a decoder of transformers read long contexts block by block (docs/convert.md).

    Weights stay as they are. The settings are kept in model.config.tercet, which save_pretrained writes; a model loaded
    with attn_implementation="tercet" reads them there, or takes these defaults.

    config          block sizes; `window` has no effect
    scorer          what chooses the blocks: "own" (the model's own queries and keys) or "compressed" (means of keys)
    score_channels  channels of a head that "own" reads, those that RoPE rotates slowest, or "all" of them. Default: 32,
                    or all where RoPE rotates only a part of them, or in a way that is not known
    layers          which layers are sparse, counted from 0; the others stay dense
    dense_below     queries at positions below this read everything, as in the dense model
    exact_groups    with "own": the KV heads of each layer that choose by it, such as [[0, 1], [], [1]]; the others
                    choose by means of keys. Empty: all choose by it
    """
    check_model(model)
    stored = model.config.get_text_config()
    settings: dict[str, Any] = {
        **DEFAULTS, "nsa": asdict(config or NSAConfig()), "dense_below": dense_below, "selector": scorer
    }  # fmt: skip
    if score_channels is not None:
        _check_channels(model, scorer, score_channels)
        settings["score_channels"] = score_channels
    if layers is not None:
        count = stored.num_hidden_layers
        if not layers or not set(layers) <= {*range(count)}:
            raise UnsupportedError(f"layers={[*layers]} must be some of the model's layers, 0 to {count - 1}")
        settings |= {"layers": count, "attention": ["nsa" if i in layers else "dense" for i in range(count)]}
    if exact_groups:
        settings["exact_groups"] = [list(groups) for groups in exact_groups]
    read_settings(stored, settings)
    stored.tercet = settings
    model.set_attn_implementation(NAME)


def _check_channels(model: PreTrainedModel, scorer: str, channels: int | str) -> None:
    if scorer != "own":
        raise UnsupportedError(f'score_channels={channels!r} has no effect with scorer={scorer!r}: use scorer="own"')
    if channels == "all":
        return
    sizes: list[Any] = [layer.head_dim for _, layer, _ in attention_layers(model) if layer.tercet_rotation]
    if not sizes:
        raise UnsupportedError(
            f"score_channels={channels!r}: model_type={model.config.model_type!r} does not rotate whole heads in a "
            'known way, so it is unknown which channels are the slowest: use score_channels="all"'
        )
    _check_count(channels, sizes[0])


def _check_count(channels: object, size: int) -> None:
    if channels != "all" and (type(channels) is not int or channels % 2 or not min(16, size) <= channels <= size):
        raise UnsupportedError(f'score_channels={channels!r} must be "all" or an even number from 16 to {size}')


class Settings(NamedTuple):
    spec: AttentionSpec
    dense_layers: frozenset[int]
    exact_groups: tuple[tuple[int, ...], ...]
    score_channels: int | str
    given: bool
    """Whether the model came with settings; else these are the defaults."""

    def of_layer(self, layer: nn.Module) -> AttentionSpec:
        # a model that chooses blocks itself in some layers reads everything in the others
        kind: Any = type(layer)
        forward = None if self.given else read_forward(kind)
        index: Any = getattr(layer, "layer_idx", None)
        spec = replace(self.spec, exact_groups=self.exact_groups[index]) if self.exact_groups else self.spec
        if index in self.dense_layers or (forward and "block_indices" in forward.arguments):
            return replace(spec, dense_below=sys.maxsize)
        return spec

    def channels(self, layer: nn.Module, size: int) -> Ranges | None:
        """Channels that "own" reads; None: all."""
        rotation, count = getattr(layer, "tercet_rotation", None), self.score_channels
        if rotation is None or not isinstance(count, int) or count >= size:
            return None
        if rotation == "pairs":
            return ((size - count, size),)
        return slow_channels(size, count // 2)


def saved_model(config: PreTrainedConfig, settings: Mapping[str, Any] | None = None) -> ModelConfig:
    """The entry `tercet` of a config.json, or these settings, less what only `use_block_sparse` knows."""
    known = {name: value for name, value in (settings or config.tercet).items() if name != "score_channels"}
    if known.get("exact_groups"):  # which are checked against the sizes of the model
        heads = config.num_attention_heads
        sizes = {"heads": heads, "kv_heads": getattr(config, "num_key_value_heads", None) or heads}
        known = {"layers": config.num_hidden_layers, **sizes, **known}
    try:
        return ModelConfig.model_validate(known)
    except ValidationError as error:
        raise UnsupportedError(first_problem(error, "config.tercet")) from None


def read_settings(config: PreTrainedConfig, settings: Mapping[str, Any] | None = None) -> Settings:
    """The settings in a model's configuration, as `use_block_sparse` or `tercet export hf --format llama` left them."""
    stored = settings or getattr(config, "tercet", None) or {}
    model = saved_model(config, stored or DEFAULTS)
    kinds = model.attention_kinds
    if "window" in kinds or ("nsa" in kinds and model.spec("nsa").gated):
        raise unsupported(
            f"tercet.attention={model.attention!r}", "its layers must be block-sparse (gate=none) or dense"
        )
    if SCORERS[model.selector].reads == "projections":
        raise unsupported(
            f"tercet.selector={model.selector!r}",
            "its weights are not in the model; to choose by its own queries and keys, call use_block_sparse(model, …)",
        )
    dense = frozenset(i for i, kind in enumerate(kinds) if kind == "dense")
    spec = block_sparse(model.nsa, model.selector, model.dense_below)
    channels = stored.get("score_channels", SCORE_CHANNELS)
    if "score_channels" in stored:
        _check_count(channels, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return Settings(spec, dense, model.exact_groups, channels, bool(stored))
