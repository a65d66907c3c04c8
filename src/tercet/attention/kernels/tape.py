"""A recorded call, as a list of steps over a list of values: replay.py runs it instead of the call.

The values: the call's tensors, each in its slot, the workspace, the addresses that kernels take, and all the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tercet.attention.kernels.launch import Direct, current_stream

# ------------------------------------------------------------ what was recorded


class Slot:
    """A tensor of the call, by its number, in place of the tensor."""

    def __init__(self, number: int) -> None:
        self.number = number


class Descriptor:
    """An argument that Triton makes of a tensor descriptor, given the address of its base."""

    def __init__(self, base: int, make: Callable[[int], Any]) -> None:
        self.base, self.make = base, make


class Known(NamedTuple):
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


class Allocation(NamedTuple):
    number: int
    function: Any  # torch.empty or torch.zeros


class Operator(NamedTuple):
    function: Any
    template: Any  # (args, kwargs)
    outputs: list[int]


class Launch(NamedTuple):
    kernel: Direct
    template: list[Any]


Event = Allocation | Operator | Launch

# ------------------------------------------------------------ the tape

_Values = list[Any]
_Step = Callable[[_Values, int], None]  # given the values and the stream
_Places = list[tuple[int, int]]  # where among the values addresses in a tensor belong, and their offsets in bytes


class Tape:
    def __init__(self, steps: list[_Step], values: _Values, result: Callable[[_Values], Any]) -> None:
        self._steps, self._values, self._result = steps, values, result

    def run(self, tensors: list[Tensor]) -> Any:
        values = self._values.copy()
        values[: len(tensors)] = tensors
        stream = current_stream()
        for step in self._steps:
            step(values, stream)
        return self._result(values)


class Assembly:
    """Makes a tape of what was recorded. Its values: the tensor of each slot, the workspace, the rest."""

    def __init__(self, known: list[Known], events: list[Event], inputs: int, result: Any) -> None:
        self._known, self._events, self._inputs, self._result = known, events, range(inputs), result
        self._values: _Values = [None] * (len(self._known) + 1)
        self._workspace = len(self._known)  # its slot
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
            if isinstance(event, Allocation):
                if event.function is not torch.empty:
                    as_tensors.add(event.number)
                continue
            outputs = event.outputs if isinstance(event, Operator) else ()
            for number in (*_slots_in(event.template), *outputs):
                root = self._known[number].root
                first.setdefault(root, i)
                self._last[root] = max(i, self._last.get(root, 0))
                if isinstance(event, Operator):
                    as_tensors.add(root)
        temporary = [root for root in first if root not in as_tensors]
        sizes = [(self._known[root].bytes, first[root], self._last[root]) for root in temporary]
        offsets, self._bytes = share_memory(sizes)
        self._offsets = dict(zip(temporary, offsets, strict=True))  # in the workspace
        self._begin = min((first[root] for root in temporary), default=-1)  # of the workspace: first and last use
        self._end = max((self._last[root] for root in temporary), default=-1)

    def tape(self) -> Tape:
        for i, event in enumerate(self._events):
            if i == self._begin:
                new = partial(torch.empty, (self._bytes,), dtype=torch.uint8, device=self._known[0].device)
                self._steps.append(_allocate(new, self._workspace, self._places[self._workspace]))
            if isinstance(event, Launch):
                self._steps.append(self._launch(event))
            elif isinstance(event, Operator):
                outputs = [(number, self._places[number]) for number in event.outputs]
                self._make_views(event.template)
                self._steps.append(_operate(event.function, _reader(event.template), outputs))
                self._made |= {*event.outputs}
            elif event.number in self._last and event.number not in self._offsets:
                x = self._known[event.number]
                new = partial(event.function, x.shape, dtype=x.dtype, device=x.device)
                self._steps.append(_allocate(new, event.number, self._places[event.number]))
                self._made.add(event.number)
            unused = [n for n in self._made if self._last.get(self._known[n].root) == i and n not in self._inputs]
            unused += [self._workspace] * (i == self._end)
            if unused:
                self._steps.append(_drop(unused))
        self._make_views(self._result)
        given = [(i, place, offset) for i in self._inputs for place, offset in self._places[i]]
        return Tape([_locate(given), *self._steps], self._values, _reader(self._result))

    def _launch(self, event: Launch) -> _Step:
        places, descriptors = [], []
        for x in event.template:
            if isinstance(x, Slot):
                places.append(self._address(x.number))
                continue
            places.append(len(self._values))
            self._values.append(x)
            if isinstance(x, Descriptor):
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
                self._steps.append(_view(number, x.root, x.shape, x.stride, x.offset // x.dtype.itemsize))
                self._made.add(number)


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
            offsets[i] = max(offsets[i], _aligned(offsets[j] + lifetimes[j][0]))
        placed.append(i)
    return offsets, max((offset + size for offset, (size, _, _) in zip(offsets, lifetimes, strict=True)), default=0)


def _aligned(size: int) -> int:
    """As PyTorch aligns tensors."""
    return -(-size // 512) * 512


def _reader(template: Any) -> Callable[[_Values], Any]:
    """Fills a template in."""
    if isinstance(template, Slot):
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
    if isinstance(template, Slot):
        return [template.number]
    if isinstance(template, Descriptor):
        return [template.base]
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


def _view(place: int, root: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> _Step:
    def step(values: _Values, stream: int) -> None:
        whole = values[root]
        values[place] = whole.as_strided(shape, stride, whole.storage_offset() + offset)

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
