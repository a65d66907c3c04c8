"""Replay a whole call: repeat the allocations and launches that its first run recorded, with new tensors.

Between its launches a call only computes what follows from shapes, strides and settings: which kernels, which grids,
fifty arguments each. On short sequences that takes longer than the kernels. So the first call with a layout records a
tape, and later ones replay it: allocate, fill in the addresses, launch.

A tape is a list of steps over one list of values: the call's tensors, the addresses in them that kernels take, and all
the numbers. A launch picks its arguments from the values. Kernels need addresses only, so a tensor is
made only if it is returned or an argument of a PyTorch operator. All others lie in one buffer per call, the workspace;
those that are never needed at the same time share its memory.

Calls with packed documents are not replayed: the number of documents differs in almost every call.

A function can be replayed if its only work on the device is launches through launch.py and PyTorch operators, and if
none of its decisions depends on their results. A tape holds no tensor, and frees the workspace and its own tensors
after their last use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tercet.attention.kernels.launch import Direct, direct, hooked, recording
from tercet.attention.kernels.tape import (
    Allocation,
    Assembly,
    Descriptor,
    Event,
    Known,
    Launch,
    Operator,
    Slot,
    Tape,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MOST_TAPES = 256
_tapes: dict[Hashable, Tape | None] = {}  # None: cannot be replayed
_UNKNOWN: Any = object()


def replayed(function: _Function) -> _Function:
    """Decorator. Arguments: tensors, hashable values, and lists and tuples of them, a tensor first."""

    @wraps(function)
    def run(*args: Any) -> Any:
        first = args[0] if isinstance(args[0], Tensor) else args[0][0]
        if not can_replay(first) or hooked():
            return function(*args)
        tensors: list[Tensor] = []
        layout = _layout(args, tensors)
        if layout is None:
            return function(*args)
        numbers = [id(x) for x in tensors]
        # the same tensor given twice has one slot
        aliases = () if len(set(numbers)) == len(numbers) else tuple(map(numbers.index, numbers))
        key = (function, layout, aliases)
        tape = _tapes.get(key, _UNKNOWN)
        if tape is None:
            return function(*args)
        if tape is not _UNKNOWN:
            return tape.run(tensors)
        if len(_tapes) >= _MOST_TAPES:
            forget_tapes()
        return _record(key, function, args, tensors)

    return run  # type: ignore[return-value]


def forget_tapes() -> None:
    """Call after changing anything that decides about launches and is not an argument, such as the table."""
    _tapes.clear()


def can_replay(x: Tensor) -> bool:
    """Not in Triton's interpreter. Within another dispatch mode, it must see every operator."""
    return x.is_cuda and torch._C._len_torch_dispatch_stack() == 0


def _layout(values: Sequence[Any], tensors: list[Tensor]) -> Hashable:
    """All that a call's launches depend on; collects its tensors. None with packed documents."""
    found: list[Hashable] = []
    for x in values:
        if isinstance(x, Tensor):
            dtype, stride = x.dtype, x.stride()
            if dtype is torch.int32 and len(stride) == 1:
                return None  # bounds of documents
            tensors.append(x)
            found += (x.shape, stride, dtype, x.get_device(), x.data_ptr() & 15)
        elif isinstance(x, (tuple, list)):
            inner = _layout(x, tensors)
            if inner is None:
                return None
            found.append(inner)
        else:
            found.append(x)
    return tuple(found)


def _record(key: Hashable, function: Callable[..., Any], args: tuple, tensors: list[Tensor]) -> Any:
    recorder = _Recorder(tensors)
    recording.recorder = recorder
    try:
        with recorder:
            result = function(*args)
    finally:
        recording.recorder = None
    template = recorder.template(result)
    _tapes[key] = (
        Assembly(recorder.known, recorder.events, recorder.inputs, template).tape() if recorder.complete else None
    )
    return result


# ------------------------------------------------------------ recording

_ALLOCATIONS = {"empty": torch.empty, "empty_like": torch.empty, "zeros": torch.zeros}


class _Recorder(TorchDispatchMode):
    """Lists what a call does. Keeps no tensor alive."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.complete = True  # whether the call can be replayed
        self.known: list[Known] = []
        self.events: list[Event] = []
        self.inputs = len(tensors)
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id, which a later tensor may have again
        for x in tensors:
            self._new(x)

    def _new(self, x: Tensor, root: int | None = None, offset: int = 0) -> int:
        number = len(self.known)
        place = (number if root is None else root), offset
        self.known.append(Known(*place, tuple(x.shape), x.stride(), x.dtype, x.device))
        self._numbers[id(x)] = weakref.ref(x), number
        return number

    def _number(self, x: Tensor) -> int | None:
        found = self._numbers.get(id(x))
        return None if found is None or found[0]() is not x else found[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, tuple | list) else [result]
        template = self.template((args, kwargs or {}))
        if func.is_view and found[0].dtype == args[0].dtype:
            given, first = self.known[template[0][0].number], args[0].storage_offset()
            for x in found:
                self._new(x, given.root, given.offset + (x.storage_offset() - first) * x.element_size())
        elif (function := _ALLOCATIONS.get(func.overloadpacket.__name__)) and result.is_contiguous():
            self.events.append(Allocation(self._new(result), function))
        else:
            known = [self._number(x) for x in found]  # if it works in place
            outputs = [self._new(x) if number is None else number for x, number in zip(found, known, strict=True)]
            self.events.append(Operator(func, template, outputs))
        return result

    def launched(self, compiled: Any, grid: tuple[int, int, int], args: tuple) -> None:
        if compiled is None:
            self.complete = False
            return
        kernel, template, descriptors = direct(compiled, grid), [], 0
        for x in args:
            if hasattr(x, "block_shape"):
                make = partial(_fill_descriptor, kernel, descriptors, type(x), vars(x) | {"base": None})
                template += (Descriptor(self.template(x.base).number, make), *kernel.expand(descriptors, x)[1:])
                descriptors += 1
            else:
                template.append(self.template(x))
        self.events.append(Launch(kernel, template))

    def template(self, x: Any) -> Any:
        """x with slots in place of tensors."""
        if isinstance(x, Tensor):
            number = self._number(x)
            self.complete = self.complete and number is not None
            return Slot(number or 0)
        if isinstance(x, tuple | list):
            parts = [self.template(y) for y in x]
            return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
        if isinstance(x, dict):
            return {name: self.template(y) for name, y in x.items()}
        return x


class _Address(int):
    """Stands in for the tensor of a descriptor."""

    def data_ptr(self) -> int:
        return self


def _fill_descriptor(kernel: Direct, number: int, kind: type, fields: dict[str, Any], address: int) -> Any:
    x = kind.__new__(kind)
    x.__dict__.update(fields, base=_Address(address))
    return kernel.expand(number, x)[0]
