"""Replay a whole call: repeat the allocations and launches that its first run recorded, with new tensors.

Between its launches a call only computes what follows from shapes, strides and settings: which kernels, which grids,
fifty arguments each. On short sequences that takes longer than the kernels. So the first call with a layout records a
tape, and later ones replay it: allocate, fill in the addresses, launch.

A tape is a list of steps over one list of values: the call's tensors, each in its slot, the workspace, the addresses
that kernels take, and all the numbers. Kernels need addresses only, so a tensor is made only if it is returned or an
argument of a PyTorch operator. All others lie in one buffer per call, the workspace; those that are never needed at the
same time share its memory.

Calls with packed documents are not replayed: the number of documents differs in almost every call.

A function can be replayed if its only work on the device is launches through launch.py and PyTorch operators, and if
none of its decisions depends on their results. A tape holds no tensor, and frees the workspace and its own tensors
after their last use.
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
    """Decorator. Arguments: tensors, hashable values, and lists and named tuples of them, a tensor first."""

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
        recorder = _Recorder(tensors)
        recording.recorder = recorder
        try:
            with recorder:
                result = function(*args)
        finally:
            recording.recorder = None
        template = recorder.template(result)
        _tapes[key] = Tape(recorder, template) if recorder.complete else None
        return result

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
        elif isinstance(x, list) or hasattr(x, "_fields"):
            inner = _layout(x, tensors)
            if inner is None:
                return None
            found.append(inner)
        else:
            found.append(x)
    return tuple(found)


# ------------------------------------------------------------ recording


class _Slot:
    """A tensor of the call, by its number, in place of the tensor. `make`: an argument that Triton makes of a tensor
    descriptor, given the address of this tensor."""

    def __init__(self, number: int, make: Callable[[int], Any] | None = None) -> None:
        self.number, self.make = number, make


class _Known(NamedTuple):
    """A tensor of the call. A view lies in its root, `offset` bytes after its first element."""

    root: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Event(NamedTuple):
    function: Any  # torch.empty or torch.zeros, an operator, or a kernel's launch
    template: Any  # of an operator: (args, kwargs); of a launch: its arguments
    outputs: tuple[int, ...] = ()

    @property
    def allocates(self) -> bool:
        return self.template is None


_ALLOCATIONS = {"empty": torch.empty, "empty_like": torch.empty, "zeros": torch.zeros}


class _Recorder(TorchDispatchMode):
    """Lists what a call does. Keeps no tensor alive."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.complete = True  # whether the call can be replayed
        self.known: list[_Known] = []
        self.events: list[_Event] = []
        self.inputs = range(len(tensors))
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
            self.events.append(_Event(function, None, (self._new(result),)))
        else:
            known = [self._number(x) for x in found]  # if it works in place
            outputs = [self._new(x) if number is None else number for x, number in zip(found, known, strict=True)]
            self.events.append(_Event(func, template, tuple(outputs)))
        return result

    def launched(self, compiled: Any, grid: tuple[int, int, int], args: tuple) -> None:
        if compiled is None:
            self.complete = False
            return
        kernel, template, descriptors = direct(compiled, grid), [], 0
        for x in args:
            if hasattr(x, "block_shape"):
                make = partial(_fill_descriptor, kernel, descriptors, type(x), vars(x) | {"base": None})
                template += (_Slot(self.template(x.base).number, make), *kernel.expand(descriptors, x)[1:])
                descriptors += 1
            else:
                template.append(self.template(x))
        self.events.append(_Event(kernel, template))

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


# ------------------------------------------------------------ the tape

_Values = list[Any]
_Step = Callable[[_Values, int], None]  # given the values and the stream
_Places = list[tuple[int, int]]  # where among the values addresses in a tensor belong, and their offsets in bytes


class Tape:
    """What a recorder listed, as steps."""

    def __init__(self, recorder: _Recorder, result: Any) -> None:
        self._known, events, inputs = recorder.known, recorder.events, recorder.inputs
        self._workspace = len(self._known)  # its slot
        self._values: _Values = [None] * (self._workspace + 1)
        self._places: list[_Places] = [[] for _ in self._values]  # of each slot
        self._place_of: dict[tuple[int, int], int] = {}
        self._steps: list[_Step] = []
        self._made = set(inputs)  # slots whose tensor exists
        last, begin, end, size = self._plan_memory(events, inputs, result)
        for i, event in enumerate(events):
            if i == begin:
                new = partial(torch.empty, (size,), dtype=torch.uint8, device=self._known[0].device)
                self._made.add(self._workspace)
                self._steps.append(_allocate(new, self._workspace, self._places[self._workspace]))
            if isinstance(event.function, Direct):
                self._launch(event)
            elif not event.allocates:
                self._make_views(event.template)
                outputs = [(number, self._places[number]) for number in event.outputs]
                self._steps.append(_operate(event.function, _reader(event.template), outputs))
                self._made |= {*event.outputs}
            elif (root := event.outputs[0]) in last and root not in self._offsets:
                x = self._known[root]
                new = partial(event.function, x.shape, dtype=x.dtype, device=x.device)
                self._steps.append(_allocate(new, root, self._places[root]))
                self._made.add(root)
            unused = [n for n in self._made if n < self._workspace and last.get(self._known[n].root) == i]
            unused = [n for n in unused if n not in inputs] + [self._workspace] * (i == end)
            if unused:
                self._steps.append(_drop(unused))
        self._make_views(result)
        self._result = _reader(result)
        given = [(i, place, offset) for i in inputs for place, offset in self._places[i]]
        self._steps.insert(0, _locate(given))

    def run(self, tensors: list[Tensor]) -> Any:
        values = self._values.copy()
        values[: len(tensors)] = tensors
        stream = current_stream()
        for step in self._steps:
            step(values, stream)
        return self._result(values)

    def _plan_memory(self, events: list[_Event], inputs: range, result: Any) -> tuple[dict[int, int], int, int, int]:
        """(root -> the event after which nothing needs it, first and last use of the workspace, its size)."""
        as_tensors = {self._known[i].root for i in _slots_in(result)}
        last = dict.fromkeys(as_tensors, len(events))
        first: dict[int, int] = {}
        as_tensors |= {*inputs}
        for i, event in enumerate(events):
            if event.allocates:
                as_tensors |= {*event.outputs} if event.function is not torch.empty else set()
                continue
            for number in (*_slots_in(event.template), *event.outputs):
                root = self._known[number].root
                first.setdefault(root, i)
                last[root] = max(i, last.get(root, 0))
                if not isinstance(event.function, Direct):
                    as_tensors.add(root)
        temporary = [root for root in first if root not in as_tensors]
        known = [self._known[root] for root in temporary]
        sizes = [torch.Size(x.shape).numel() * x.dtype.itemsize for x in known]
        offsets, size = share_memory([(n, first[r], last[r]) for n, r in zip(sizes, temporary, strict=True)])
        self._offsets = dict(zip(temporary, offsets, strict=True))  # in the workspace
        begin = min((first[root] for root in temporary), default=-1)
        return last, begin, max((last[root] for root in temporary), default=-1), size

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
                self._steps.append(_view(number, self._known[number]))
                self._made.add(number)

    def _launch(self, event: _Event) -> None:
        places, descriptors = [], []
        for x in event.template:
            if isinstance(x, _Slot) and x.make is None:
                places.append(self._address(x.number))
                continue
            places.append(len(self._values))
            self._values.append(None if isinstance(x, _Slot) else x)
            if isinstance(x, _Slot):
                descriptors.append((places[-1], self._address(x.number), {}, x.make))
        self._steps.append(_launch(event.function.launch, itemgetter(*places), descriptors))


def share_memory(lifetimes: list[tuple[int, int, int]]) -> tuple[list[int], int]:
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
            past = offsets[j] + lifetimes[j][0]
            offsets[i] = max(offsets[i], -(-past // 512) * 512)  # as PyTorch aligns tensors
        placed.append(i)
    return offsets, max((offset + size for offset, (size, _, _) in zip(offsets, lifetimes, strict=True)), default=0)


def _reader(template: Any) -> Callable[[_Values], Any]:
    """Fills a template in."""
    if isinstance(template, _Slot):
        return itemgetter(template.number)
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
    parts = template.values() if isinstance(template, dict) else template if isinstance(template, tuple | list) else ()
    return [slot for x in parts for slot in _slots_in(x)]


# ------------------------------------------------------------ steps


def _locate(tensors: list[tuple[int, int, int]]) -> _Step:
    """tensors: (place, place of the address, offset)."""

    def step(values: _Values, stream: int) -> None:
        for tensor, place, offset in tensors:
            values[place] = values[tensor].data_ptr() + offset

    return step


def _allocate(new: Callable[[], Tensor], tensor: int, places: _Places) -> _Step:
    def step(values: _Values, stream: int) -> None:
        values[tensor] = x = new()
        address = x.data_ptr()
        for place, offset in places:
            values[place] = address + offset

    return step


def _operate(function: Any, arguments: Callable[[_Values], Any], outputs: list[tuple[int, _Places]]) -> _Step:
    def step(values: _Values, stream: int) -> None:
        args, kwargs = arguments(values)
        found = function(*args, **kwargs)
        for (tensor, places), x in zip(outputs, found if isinstance(found, tuple | list) else [found], strict=True):
            values[tensor] = x
            address = x.data_ptr()
            for place, offset in places:
                values[place] = address + offset

    return step


def _view(place: int, x: _Known) -> _Step:
    root, shape, stride, offset = x.root, x.shape, x.stride, x.offset // x.dtype.itemsize

    def step(values: _Values, stream: int) -> None:
        whole = values[root]
        values[place] = whole.as_strided(shape, stride, whole.storage_offset() + offset)

    return step


def _drop(places: list[int]) -> _Step:
    def step(values: _Values, stream: int) -> None:
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

    def step(values: _Values, stream: int) -> None:
        for place, base, filled, fill in descriptors:
            address = values[base]
            found = filled.get(address)
            if found is None:
                if len(filled) >= _MOST_DESCRIPTORS:
                    filled.clear()
                found = filled[address] = fill(address)
            values[place] = found
        launch(stream, arguments(values))

    return step
