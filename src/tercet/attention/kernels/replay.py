"""Replay a whole call: repeat the allocations and launches that its first run recorded, with new tensors.

Between its launches a call only computes what follows from shapes, strides and settings: which kernels, which grids,
fifty arguments each. On short sequences that takes longer than the kernels. So the first call with a layout records a
tape, and later ones replay it: allocate, fill in the addresses, launch.

A tape is a list of steps over one list of values: the stream, the call's tensors, the addresses in them that kernels
take, and all the numbers. A launch picks its arguments from the values. Kernels need addresses only, so a tensor is
made only if it is returned or an argument of a PyTorch operator. All others lie in one buffer per call, the workspace;
those that are never needed at the same time share its memory.

Calls with packed documents are not replayed: the number of documents differs in almost every call.

A function can be replayed if its only work on the device is launches through launch.py and PyTorch operators, and if
none of its decisions depends on their results. A tape holds no tensor; the workspace is freed when the call returns,
tensors that only operators use after their last use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial, wraps
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tercet.attention.kernels.launch import Direct, current_stream, direct, hooked, recording

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
    _tapes[key] = _Assembly(recorder, template).tape() if recorder.complete else None
    return result


# ------------------------------------------------------------ recording


class _Slot:
    """A tensor of the call, by its number, in place of the tensor."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Descriptor:
    """An argument that Triton makes of a tensor descriptor, given the address of its base."""

    def __init__(self, base: int, make: Callable[[int], Any]) -> None:
        self.base, self.make = base, make


class _Known(NamedTuple):
    """A tensor of the call. A view lies in its root, `offset` bytes after its first element."""

    root: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _Allocation(NamedTuple):
    number: int
    function: Any  # torch.empty or torch.zeros


class _Operator(NamedTuple):
    function: Any
    template: Any  # (args, kwargs)
    outputs: list[int]


class _Launch(NamedTuple):
    kernel: Direct
    template: list[Any]


_ALLOCATIONS = {"empty": torch.empty, "empty_like": torch.empty, "zeros": torch.zeros}


class _Recorder(TorchDispatchMode):
    """Lists what a call does. Keeps no tensor alive."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.complete = True  # whether the call can be replayed
        self.known: list[_Known] = []
        self.events: list[_Allocation | _Operator | _Launch] = []
        self.inputs = len(tensors)
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id, which a later tensor may have again
        for x in tensors:
            self._new(x)

    def _new(self, x: Tensor, root: int | None = None, offset: int = 0) -> int:
        number = len(self.known)
        place = (number if root is None else root), offset
        self.known.append(_Known(*place, tuple(x.shape), x.stride(), x.dtype, x.device))
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
            self.events.append(_Allocation(self._new(result), function))
        else:
            known = [self._number(x) for x in found]  # if it works in place
            outputs = [self._new(x) if number is None else number for x, number in zip(found, known, strict=True)]
            self.events.append(_Operator(func, template, outputs))
        return result

    def launched(self, compiled: Any, grid: tuple[int, int, int], args: tuple) -> None:
        if compiled is None:
            self.complete = False
            return
        kernel, template, descriptors = direct(compiled, grid), [], 0
        for x in args:
            if hasattr(x, "block_shape"):
                make = partial(_fill_descriptor, kernel, descriptors, type(x), vars(x) | {"base": None})
                template += (_Descriptor(self.template(x.base).number, make), *kernel.expand(descriptors, x)[1:])
                descriptors += 1
            else:
                template.append(self.template(x))
        self.events.append(_Launch(kernel, template))

    def template(self, x: Any) -> Any:
        """x with slots in place of tensors."""
        if isinstance(x, Tensor):
            number = self._number(x)
            self.complete = self.complete and number is not None
            return _Slot(number or 0)
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


# ------------------------------------------------------------ tapes

_Values = list[Any]
_Step = Callable[[_Values], None]
_Places = list[tuple[int, int]]  # where among the values addresses in a tensor belong, and their offsets in bytes


class Tape:
    def __init__(self, steps: list[_Step], values: _Values, result: Callable[[_Values], Any]) -> None:
        self._steps, self._values, self._result = steps, values, result

    def run(self, tensors: list[Tensor]) -> Any:
        values = self._values.copy()
        values[0] = current_stream()
        values[1 : 1 + len(tensors)] = tensors
        for step in self._steps:
            step(values)
        return self._result(values)


class _Assembly:
    """Makes a tape of what was recorded. Its values: the stream, the tensor of each slot, the workspace, the rest."""

    def __init__(self, recorder: _Recorder, result: Any) -> None:
        self._known, self._events, self._result = recorder.known, recorder.events, result
        self._inputs = range(recorder.inputs)
        self._values: _Values = [None] * (2 + len(self._known))
        self._workspace = len(self._known)  # as if it were a slot
        self._places: dict[int, _Places] = {root: [] for root in range(len(self._known) + 1)}
        self._place_of: dict[tuple[int, int], int] = {}
        self._made: set[int] = set(self._inputs)  # slots whose tensor exists
        self._steps: list[_Step] = []
        self._find_lifetimes()

    def _find_lifetimes(self) -> None:
        returned = {self._known[i].root for i in _slots_in(self._result)}
        self._last = dict.fromkeys(returned, len(self._events))  # root -> the event after which nothing needs it
        first: dict[int, int] = {}
        as_tensors = returned | {*self._inputs}
        for i, event in enumerate(self._events):
            if isinstance(event, _Allocation):
                if event.function is not torch.empty:
                    as_tensors.add(event.number)
                continue
            outputs = event.outputs if isinstance(event, _Operator) else ()
            for number in (*_slots_in(event.template), *outputs):
                root = self._known[number].root
                first.setdefault(root, i)
                self._last[root] = max(i, self._last.get(root, 0))
                if isinstance(event, _Operator):
                    as_tensors.add(root)
        temporary = [root for root in first if root not in as_tensors]
        sizes = [(self._known[root].bytes, first[root], self._last[root]) for root in temporary]
        offsets, self._bytes = _share_memory(sizes)
        self._offsets = dict(zip(temporary, offsets, strict=True))  # in the workspace

    def tape(self) -> Tape:
        if self._bytes:
            new = partial(torch.empty, (self._bytes,), dtype=torch.uint8, device=self._known[0].device)
            self._steps.append(_allocate(new, 1 + self._workspace, self._places[self._workspace]))
        for i, event in enumerate(self._events):
            if isinstance(event, _Launch):
                self._steps.append(self._launch(event))
            elif isinstance(event, _Operator):
                outputs = [(1 + number, self._places[number]) for number in event.outputs]
                self._make_views(event.template)
                self._steps.append(_operate(event.function, _reader(event.template), outputs))
                self._made |= {*event.outputs}
            elif event.number in self._last and event.number not in self._offsets:
                self._steps.append(self._allocation(event))
                self._made.add(event.number)
            unused = [n for n in self._made if self._last.get(self._known[n].root) == i and n not in self._inputs]
            if unused:
                self._steps.append(_drop([1 + n for n in unused]))
        self._make_views(self._result)
        given = [(1 + i, place, offset) for i in self._inputs for place, offset in self._places[i]]
        return Tape([_locate(given), *self._steps], self._values, _reader(self._result))

    def _allocation(self, event: _Allocation) -> _Step:
        x, place, places = self._known[event.number], 1 + event.number, self._places[event.number]
        for i in self._inputs if event.function is torch.empty else ():
            if self._known[i][2:] == x[2:]:
                return _allocate_like(1 + i, place, places)
        return _allocate(partial(event.function, x.shape, dtype=x.dtype, device=x.device), place, places)

    def _launch(self, event: _Launch) -> _Step:
        places, descriptors = [], []
        for x in event.template:
            if isinstance(x, _Slot):
                places.append(self._address(x.number))
                continue
            places.append(len(self._values))
            self._values.append(x)
            if isinstance(x, _Descriptor):
                self._values[-1] = None
                descriptors.append((places[-1], self._address(x.base), {}, x.make))
        return _launch(event.kernel.launch, itemgetter(*places), descriptors)

    def _address(self, number: int) -> int:
        """The place of a tensor's address among the values."""
        root, offset = self._known[number][:2]
        if root in self._offsets:
            root, offset = self._workspace, self._offsets[root] + offset
        if (root, offset) not in self._place_of:
            self._place_of[root, offset] = len(self._values)
            self._places[root].append((len(self._values), offset))
            self._values.append(None)
        return self._place_of[root, offset]

    def _make_views(self, template: Any) -> None:
        for number in _slots_in(template):
            if number not in self._made:
                x = self._known[number]
                self._steps.append(_view(1 + number, 1 + x.root, x.shape, x.stride, x.offset // x.dtype.itemsize))
                self._made.add(number)


def _share_memory(lifetimes: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Offsets in one buffer, and its size, for tensors of (bytes, first use, last use): the largest first, each at the
    first place that is free for as long as it is needed."""
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    for i in sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i][0]):
        size, first, last = lifetimes[i]
        beside = [j for j in placed if lifetimes[j][1] <= last and first <= lifetimes[j][2]]
        for j in sorted(beside, key=lambda j: offsets[j]):
            if offsets[i] + size <= offsets[j]:
                break
            offsets[i] = max(offsets[i], _aligned(offsets[j] + lifetimes[j][0]))
        placed.append(i)
    return offsets, max((offset + size for offset, (size, _, _) in zip(offsets, lifetimes, strict=True)), default=0)


def _aligned(size: int) -> int:
    """As PyTorch aligns tensors."""
    return -(-size // 512) * 512


def _reader(template: Any) -> Callable[[_Values], Any]:
    """Fills a template in."""
    if isinstance(template, _Slot):
        return itemgetter(1 + template.number)
    if isinstance(template, tuple | list):
        parts = [_reader(x) for x in template]
        make = getattr(type(template), "_make", type(template))  # of a named tuple
        return lambda values: make([part(values) for part in parts])
    if isinstance(template, dict):
        named = {name: _reader(x) for name, x in template.items()}
        return lambda values: {name: part(values) for name, part in named.items()}
    return lambda values: template


def _slots_in(template: Any) -> list[int]:
    if isinstance(template, _Slot):
        return [template.number]
    if isinstance(template, _Descriptor):
        return [template.base]
    parts = template.values() if isinstance(template, dict) else template if isinstance(template, tuple | list) else ()
    return [slot for x in parts for slot in _slots_in(x)]


# ------------------------------------------------------------ steps


def _locate(tensors: list[tuple[int, int, int]]) -> _Step:
    """tensors: (place, place of the address, offset)."""

    def step(values: _Values) -> None:
        for tensor, place, offset in tensors:
            values[place] = values[tensor].data_ptr() + offset

    return step


def _allocate(new: Callable[[], Tensor], tensor: int, places: _Places) -> _Step:
    def step(values: _Values) -> None:
        values[tensor] = x = new()
        address = x.data_ptr()
        for place, offset in places:
            values[place] = address + offset

    return step


def _allocate_like(given: int, tensor: int, places: _Places) -> _Step:
    """Faster than to read shape, dtype and device from Python objects."""

    def step(values: _Values) -> None:
        values[tensor] = x = torch.empty_like(values[given])
        address = x.data_ptr()
        for place, offset in places:
            values[place] = address + offset

    return step


def _view(place: int, root: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> _Step:
    def step(values: _Values) -> None:
        whole = values[root]
        values[place] = whole.as_strided(shape, stride, whole.storage_offset() + offset)

    return step


def _operate(function: Any, arguments: Callable[[_Values], Any], outputs: list[tuple[int, _Places]]) -> _Step:
    def step(values: _Values) -> None:
        args, kwargs = arguments(values)
        found = function(*args, **kwargs)
        for (tensor, places), x in zip(outputs, found if isinstance(found, tuple | list) else [found], strict=True):
            values[tensor] = x
            address = x.data_ptr()
            for place, offset in places:
                values[place] = address + offset

    return step


def _drop(places: list[int]) -> _Step:
    def step(values: _Values) -> None:
        for place in places:
            values[place] = None

    return step


_MOST_DESCRIPTORS = 256  # filled ones per argument


def _launch(
    launch: Callable[[int, tuple], None],
    arguments: Callable[[_Values], tuple],
    descriptors: list[tuple[int, int, dict[int, Any], Callable[[int], Any]]],
) -> _Step:
    """descriptors: (place, place of the address, filled ones by address, fill)."""

    def step(values: _Values) -> None:
        for place, base, filled, fill in descriptors:
            address = values[base]
            found = filled.get(address)
            if found is None:
                if len(filled) >= _MOST_DESCRIPTORS:
                    filled.clear()
                found = filled[address] = fill(address)
            values[place] = found
        launch(values[0], arguments(values))

    return step
