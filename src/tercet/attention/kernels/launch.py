"""The host's side of kernels: launches, descriptors of tiles, custom ops.

Launches skip Triton's inspection of every argument to find the compiled variant. With fifty arguments that takes 60 µs,
more than the kernels themselves take on short sequences. Here the caller says what the variant depends on, and the
variant is looked up by that.

Custom ops without a gradient are registered in a way cheaper than torch.library.custom_op, which wraps each call in an
autograd kernel and a check that results share no storage: 30 µs on the host, against 10 here. Without that check, ops
must take care that no result shares memory with an argument or another result (tests/kernels/test_operators.py checks
it). They are called under no_grad, or inside an autograd.Function that owns the gradient. Elsewhere they raise if an
argument requires a gradient; PyTorch would only warn and drop it. The op itself checks this, since an autograd kernel
would run on every call.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable
from functools import wraps
from types import FunctionType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = 1.4426950408889634


class Recorder(Protocol):
    def launched(self, compiled: Any, grid: tuple[int, int, int], args: tuple) -> None:
        """A kernel was launched. compiled: None in Triton's interpreter."""


class _Recording(threading.local):
    recorder: Recorder | None = None


recording = _Recording()  # of this thread (replay.py)


def launch(
    known: dict[Hashable, Any], key: Hashable, kernel: Any, grid: tuple[int, int, int], args: tuple, options: dict
) -> None:
    """Launch `kernel`. `key` must determine all that Triton specialises on: dtypes, constants, alignment, options.

    Arguments that may differ under one key must be declared `do_not_specialize`.
    """
    compiled = known.get(key)
    if compiled is None:
        # Triton's interpreter compiles nothing and returns None.
        known[key] = compiled = kernel[grid](*args, **options)
    elif hooked():
        compiled[grid](*args)
    else:
        # as compiled[grid](*args) does, without the hooks, which take as long as the launch
        compiled.run(*grid, current_stream(), compiled.function, compiled.packed_metadata, None, None, None, *args)
    if recording.recorder is not None:
        recording.recorder.launched(compiled, grid, args)


def hooked() -> bool:
    """Whether a profiler asks Triton to call it at every launch."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)  # a list of hooks, one hook or None


def current_stream() -> int:
    active = driver.active
    return active.get_current_stream(active.get_current_device())


class Direct(NamedTuple):
    """How to launch a compiled kernel with addresses in place of tensors."""

    launch: Callable[[int, tuple], None]  # given the stream and the kernel's arguments
    expand: Callable[[int, Any], list]  # the arguments for the i-th descriptor; only the first depends on its address


def direct(compiled: Any, grid: tuple[int, int, int]) -> Direct:
    """Calls the C function inside Triton's launcher: the Python around it takes longer, with descriptors 20 µs.

    Addresses also save the C function a driver call per tensor. Where the C function is not known, or takes scratch
    memory, Triton's launcher runs as a whole.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    whole = Direct(
        lambda stream, args: run(*grid, stream, function, metadata, None, None, None, *args), lambda i, x: [x]
    )
    version = triton.__version__[:4]
    if version not in ("3.6.", "3.7."):
        return whole
    from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg  # private names of these versions

    if not isinstance(run, CudaLauncher) or run.global_scratch_size or run.profile_scratch_size:
        return whole
    c_function = run.launch
    if isinstance(c_function, FunctionType):  # a wrapper that fills in the descriptors
        c_function = inspect.getclosurevars(c_function).nonlocals["launcher"]
    filled = getattr(compiled.metadata, "tensordesc_meta", None)  # one per descriptor, None: passed as numbers

    def expand(i: int, x: Any) -> list:
        return make_tensordesc_arg(x, filled[i] if filled else None)

    how, nothing = (function, run.launch_cooperative_grid, run.launch_pdl), (None,) * 5  # scratch memory and hooks
    if version == "3.6.":
        fixed = (*how, *nothing[:2], metadata, *nothing[2:])
        return Direct(lambda stream, args: c_function(*grid, stream, *fixed, *args), expand)
    fixed = (*how, metadata, *nothing, run.arg_annotations, run.kernel_signature)
    return Direct(lambda stream, args: c_function(*grid, stream, *fixed, args), expand)


_VARIANTS: dict[int, dict[Hashable, Any]] = {}


def call(kernel: Any, grid: tuple[int, ...], pointers: tuple, free: tuple, fixed: tuple, **options: int) -> None:
    """Launch `kernel(*pointers, *free, *fixed)`.

    The variant is looked up by `fixed` and by the dtype and alignment of the pointers. `free` numbers must be declared
    do_not_specialize.
    """
    grid = (*grid, 1, 1)[:3]
    if 0 in grid:
        return
    device = pointers[0].device.index
    key = (device, fixed, tuple(map(_signature, pointers)), tuple(options.values()))
    launch(_VARIANTS.setdefault(id(kernel), {}), key, kernel, grid, pointers + free + fixed, options)


def _signature(x: Any) -> Hashable:
    if x is None:
        return None
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15
    return x.base.dtype, tuple(x.block_shape)  # a tensor descriptor: alignment was checked when it was made


def power_of_2(size: int) -> int:
    """The next power of two. Triton's own function takes 5 µs, and a backward pass needs it twenty times."""
    return 1 << (size - 1).bit_length()


def padded(size: int) -> int:
    """The length of a vector in registers: the next power of two, at least what a matrix product takes."""
    return max(16, power_of_2(size))


# Tensor descriptors for TMA, Hopper's copy engine; None where plain loads are needed.


def descriptors(wanted: bool, rows: int, *tensors: Tensor) -> tuple:
    """Descriptors of tiles of `rows` rows of one head, out of [B·T, heads·D]; Nones unless all tensors allow it."""
    found = [_descriptor(x, rows) for x in tensors] if wanted else [None]
    return (None,) * len(tensors) if any(x is None for x in found) else tuple(found)


def describable(x: Tensor) -> bool:
    """Whether TMA can load tiles of x: at least 16 numbers per head, heads adjacent, 16-byte strides."""
    _, tokens, heads, size = x.shape
    _, token, head, _ = x.stride()
    if size < 16 or not tokens or (head != size and heads > 1):
        return False
    width = x.element_size()
    return not (x.data_ptr() % 16 or token * width % 16 or head * width % 16)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor | None:
    if x.shape[-1] & (x.shape[-1] - 1) or not describable(x):
        return None  # tiles of D columns, a power of two
    batch, tokens, heads, size = x.shape
    # Bypass __init__: its checks take most of 15 µs, and a training step of one layer makes 17 descriptors.
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, [batch * tokens, heads * size], [x.stride(1), 1]
    made.block_shape = [rows, size]
    return made


# Custom ops

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LIBRARY = torch.library.Library("tercet", "FRAGMENT")


def operator(fake: Callable[..., Any], schema: str | None = None) -> Callable[[_Function], _Function]:
    """Register a function that mutates none of its arguments as torch.ops.tercet.NAME.

    fake: its fake implementation; schema: its arguments and results, by default those of its annotations.
    """

    def register(function: _Function) -> _Function:
        name = function.__name__
        arguments = schema or torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + arguments, tags=(torch.Tag.pt2_compliant_tag,))

        @wraps(function)
        def kernel(*arguments: Any) -> Any:
            if torch.is_grad_enabled():
                _check_no_gradients(name, arguments)
            return function(*arguments)

        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tercet::{name}", fake, lib=_LIBRARY)
        return function

    return register


def must_dispatch() -> bool:
    """Whether PyTorch must see the ops, because it traces the call or a dispatch mode is active. Otherwise a caller may
    call their bodies, which takes less time."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _check_no_gradients(name: str, arguments: tuple[Any, ...]) -> None:
    for place, given in enumerate(arguments):
        for x in given if isinstance(given, list | tuple) else (given,):
            if isinstance(x, Tensor) and x.requires_grad:
                raise RuntimeError(
                    f"torch.ops.tercet.{name} has no gradient, and its argument {place} requires one: "
                    "call the functions of tercet.attention, or use torch.no_grad()"
                )
