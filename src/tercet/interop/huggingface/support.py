"""Which models attn_implementation="tercet" serves: read from the code of their attention layers, not from a list."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tercet.errors import UsageError

NAME = "tercet"
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
    """Raise for an argument of the attention function that changes what it computes, and that we do not know."""
    for name, meaning in _UNSUPPORTED.items():
        if arguments.get(name) is not None:
            raise unsupported(f"{name} ({meaning})", "use eager or sdpa")


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
                raise unsupported(f"{name} with {word} ({_UNSUPPORTED.get(word, 'unknown')})", "use eager or sdpa")
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
