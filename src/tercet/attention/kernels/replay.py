"""Replay a whole call: repeat the allocations and launches that its first run recorded, with new tensors.

Between its launches a call only computes what follows from shapes, strides and settings: which kernels, which grids,
fifty arguments each. On short sequences that takes longer than the kernels. So the first call with a layout records a
tape, and later ones replay it: allocate, fill in the tensors, launch.

Calls with packed documents are not replayed: the number of documents differs in almost every call.

A function can be replayed if its only work on the device is launches through launch.py and PyTorch operators, and if
none of its decisions depends on their results. A tape holds no tensor; tensors that only the tape uses are freed after
their last use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tercet.attention.kernels.launch import current_stream, hooked, recording

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Values = list[Any]  # the tensors and descriptors of a call; a slot is an index into it
_Step = Callable[[_Values, int], None]  # given the values and the stream
_MOST_TAPES = 256
_tapes: dict[Hashable, Tape | None] = {}


def replayed(function: _Function) -> _Function:
    """Decorator. Arguments: tensors, hashable values, and lists and tuples of them, a tensor first."""

    @wraps(function)
    def run(*args: Any) -> Any:
        first = args[0] if isinstance(args[0], Tensor) else args[0][0]
        if not can_replay(first) or hooked():
            return function(*args)
        tensors: list[Tensor] = []
        layout = _layout(args, tensors)
        if any(x.dim() == 1 and x.dtype == torch.int32 for x in tensors):
            return function(*args)  # bounds of documents, whose number changes from batch to batch
        numbers = [id(x) for x in tensors]
        # the same tensor given twice has one slot
        aliases = () if len(set(numbers)) == len(numbers) else tuple(map(numbers.index, numbers))
        key = (function, layout, aliases, first.device)
        if key not in _tapes:
            if len(_tapes) >= _MOST_TAPES:
                forget_tapes()
            return _record(key, function, args, tensors)
        tape = _tapes[key]
        return function(*args) if tape is None else tape.run(tensors)

    return run  # type: ignore[return-value]


def forget_tapes() -> None:
    """Call after changing anything that decides about launches and is not an argument, such as the table."""
    _tapes.clear()


def can_replay(x: Tensor) -> bool:
    """Not in Triton's interpreter. Within another dispatch mode, it must see every operator."""
    return x.is_cuda and torch._C._len_torch_dispatch_stack() == 0


def _layout(values: Sequence[Any], tensors: list[Tensor]) -> Hashable:
    """All that a call's launches depend on; collects its tensors."""
    found: list[Hashable] = []
    for x in values:
        if isinstance(x, Tensor):
            tensors.append(x)
            found += (x.shape, x.stride(), x.dtype, x.data_ptr() & 15)
        elif isinstance(x, tuple | list):
            found.append(_layout(x, tensors))
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
    tape = recorder.tape(result)
    _tapes[key] = tape if recorder.complete else None
    return result


class Tape:
    """`steps`: what to do, and the slots that no later step needs."""

    def __init__(self, steps: list[tuple[_Step, tuple[int, ...]]], slots: int, result: Any) -> None:
        self._steps, self._slots, self._result = steps, slots, result

    def run(self, tensors: list[Tensor]) -> Any:
        values: _Values = tensors + [None] * (self._slots - len(tensors))
        stream = current_stream()
        for step, unused in self._steps:
            step(values, stream)
            for slot in unused:
                values[slot] = None
        return _filled(self._result, values)


class _Slot:
    def __init__(self, number: int) -> None:
        self.number = number


class _Recorder(TorchDispatchMode):
    """Writes a tape while a call runs. Keeps no tensor alive."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.complete = True  # whether the tape can be replayed
        self._count = 0
        self._tensors: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id, which a later tensor may have again
        self._descriptors: dict[Hashable, int] = {}
        self._roots: dict[int, tuple[int, int]] = {}  # view -> the tensor that it is a view of, and its offset
        # what to do, the slots that it uses, and the slot that it is done for; None: for its effect
        self._steps: list[tuple[_Step, list[int], int | None]] = []
        self._inputs = len(tensors)
        for x in tensors:
            self._new(x)

    def _new(self, x: Tensor) -> int:
        self._count += 1
        self._tensors[id(x)] = weakref.ref(x), self._count - 1
        return self._count - 1

    def _slot(self, x: Tensor) -> int | None:
        found = self._tensors.get(id(x))
        return None if found is None or found[0]() is not x else found[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, tuple | list) else [result]
        template = self._template((args, kwargs or {}))
        if func.is_view and found[0].dtype == args[0].dtype:
            given = template[0][0].number
            root, first = self._roots.get(given, (given, args[0].storage_offset()))
            for x in found:
                slot = self._new(x)
                self._roots[slot] = root, first
                self._steps.append((_view(slot, root, x, x.storage_offset() - first), [root], slot))
        elif func.overloadpacket.__name__ in ("empty", "empty_like") and result.is_contiguous():
            slot = self._new(result)
            self._steps.append((_allocate(slot, result), [], slot))
        else:
            known = [self._slot(x) for x in found]  # if it works in place
            slots = [self._new(x) if slot is None else slot for x, slot in zip(found, known, strict=True)]
            self._steps.append((_operator(func, template, slots), [*_slots_in(template), *slots], None))
        return result

    def launched(self, compiled: Any, grid: tuple[int, int, int], args: tuple) -> None:
        if compiled is None:
            self.complete = False
        else:
            template = self._template(args)
            self._steps.append((_launch(compiled, grid, template), _slots_in(template), None))

    def _template(self, x: Any) -> Any:
        """x with slots in place of tensors and descriptors."""
        if isinstance(x, Tensor):
            slot = self._slot(x)
            self.complete = self.complete and slot is not None
            return _Slot(slot or 0)
        if isinstance(x, tuple | list):
            parts = [self._template(y) for y in x]
            return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
        if isinstance(x, dict):
            return {name: self._template(y) for name, y in x.items()}
        if hasattr(x, "block_shape"):
            return self._descriptor(x)
        return x

    def _descriptor(self, x: Any) -> _Slot:
        base = self._template(x.base).number
        key = (base, type(x), tuple(x.block_shape))
        if key not in self._descriptors:
            self._descriptors[key] = slot = self._count
            self._count += 1
            self._steps.append((_describe(slot, base, x), [base], slot))
        return _Slot(self._descriptors[key])

    def tape(self, result: Any) -> Tape:
        template = self._template(result)
        needed = {*range(self._inputs), *_slots_in(template)}
        steps = []
        for step, used, made in reversed(self._steps):
            if made is None or made in needed:
                steps.append((step, tuple({*used} - needed)))
                needed |= {*used}
        return Tape(steps[::-1], self._count, template)


def _filled(template: Any, values: _Values) -> Any:
    if isinstance(template, _Slot):
        return values[template.number]
    if isinstance(template, tuple | list):
        parts = [_filled(x, values) for x in template]
        return type(template)(*parts) if hasattr(template, "_fields") else type(template)(parts)
    if isinstance(template, dict):
        return {name: _filled(x, values) for name, x in template.items()}
    return template


def _slots_in(template: Any) -> list[int]:
    if isinstance(template, _Slot):
        return [template.number]
    parts = template.values() if isinstance(template, dict) else template if isinstance(template, tuple | list) else ()
    return [slot for x in parts for slot in _slots_in(x)]


# ------------------------------------------------------------ steps


def _allocate(slot: int, x: Tensor) -> _Step:
    shape, dtype, device = tuple(x.shape), x.dtype, x.device

    def step(values: _Values, stream: int) -> None:
        values[slot] = torch.empty(shape, dtype=dtype, device=device)

    return step


def _view(slot: int, root: int, x: Tensor, offset: int) -> _Step:
    """`offset`: from the first element of the root."""
    shape, stride = tuple(x.shape), x.stride()

    def step(values: _Values, stream: int) -> None:
        whole = values[root]
        values[slot] = whole.as_strided(shape, stride, whole.storage_offset() + offset)

    return step


def _operator(func: Any, template: Any, outputs: list[int]) -> _Step:
    def step(values: _Values, stream: int) -> None:
        args, kwargs = _filled(template, values)
        found = func(*args, **kwargs)
        for slot, x in zip(outputs, found if isinstance(found, tuple | list) else [found], strict=True):
            values[slot] = x

    return step


def _describe(slot: int, base: int, x: Any) -> _Step:
    kind, fields = type(x), {name: y for name, y in vars(x).items() if name != "base"}

    def step(values: _Values, stream: int) -> None:
        made = kind.__new__(kind)
        made.__dict__.update(fields, base=values[base])
        values[slot] = made

    return step


def _launch(compiled: Any, grid: tuple[int, int, int], template: tuple) -> _Step:
    places = [(i, x.number) for i, x in enumerate(template) if isinstance(x, _Slot)]
    fixed = [None if isinstance(x, _Slot) else x for x in template]
    run, start = compiled.run, (*grid,)
    handles = (compiled.function, compiled.packed_metadata, None, None, None)

    def step(values: _Values, stream: int) -> None:
        args = fixed.copy()
        for place, slot in places:
            args[place] = values[slot]
        run(*start, stream, *handles, *args)

    return step
