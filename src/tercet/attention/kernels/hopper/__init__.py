"""Kernels for Hopper (sm_90) in Gluon, Triton's lower-level language.

Triton waits for a matrix product before anything uses its result, and restarts its pipeline for each loop of a kernel.
In Gluon we order the instructions: products run while the warps compute exponentials, and one loop over all tiles
prefetches throughout. `table.py` says which calls these kernels take; the Triton kernels take the rest.
"""

from __future__ import annotations

from importlib.util import find_spec


def _installed() -> bool:
    try:
        return find_spec("triton.experimental.gluon.nvidia.hopper") is not None
    except ImportError:  # an older Triton
        return False


GLUON_INSTALLED = _installed()
