"""Compiles what a call would launch, for a GPU that is not there: the host code runs on CPU tensors, and every
launch is compiled for the target instead of run. Signatures, alignment and settings are exactly those that ship."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tercet.attention.kernels import table

# Shared memory that one program may use.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


@dataclass(frozen=True)
class Compiled:
    name: str
    registers: int
    stack: int  # bytes of local memory per thread: more than none means spilled registers
    shared: int
    warps: int
    serialised: str = ""  # the assembler's words where it makes every product of a Gluon kernel wait
    meetings: int = 0  # places where all warps of a program wait for each other
    fused: int = 0  # multiply-adds in fp32, which round once


class AbsentGPU:
    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int, *, resources: bool = True, only: str = "") -> Iterator[list[Compiled]]:
    """Inside, launches compile for sm_<capability> and are listed (`only`: of this kernel); outputs of the calls are
    uninitialised."""
    found: list[Compiled] = []
    seen: set[Any] = set()
    target = GPUTarget("cuda", capability, 32)

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if only and self.fn.__name__ != only:
            return
        options |= {"debug": False, "instrumentation_mode": ""}
        *_, backend, binder = self.create_binder()
        bound, specialization, chosen = binder(*args, **options)
        chosen, signature, constants, attributes = self._pack_args(backend, options, bound, specialization, chosen)
        key = (self, str(signature), str(constants), str(attributes), str(chosen))
        if key in seen:
            return
        seen.add(key)
        kernel = self.compile(
            self.ASTSource(self, signature, constants, attributes), target=target, options=chosen.__dict__
        )
        usage = _usage(kernel.asm["cubin"]) if resources else (0, 0)
        told = _serialised(kernel.asm["ptx"]) if resources and self.is_gluon() else ""
        meetings = len(re.findall(r"\bbar(?:rier)?\.sync", kernel.asm["ptx"]))
        shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
        fused = kernel.asm["ptx"].count("fma.rn.f32")
        found.append(Compiled(self.fn.__name__, *usage, shared, warps, told, meetings, fused))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(table, "generation", lambda x: capability // 10)
        patch.setattr(table, "shared_memory", lambda device: SHARED_KIB[capability] * 1024)
        before = driver._active
        driver.set_active(AbsentGPU(target))
        try:
            yield found
        finally:
            driver._active = before


def launches(capability: int, call: Callable[[], Any], *, resources: bool = True) -> list[Compiled]:
    with compiling(capability, resources=resources) as found:
        call()
    return found


def _usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(registers), int(stack)


def _serialised(ptx: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        file.write(ptx.encode())
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-arch=sm_90a", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    return "".join(re.findall(r"wgmma.* serialized.*", told.stdout + told.stderr))
