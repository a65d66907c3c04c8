"""Peak arithmetic of known devices. For an unknown one no utilisation is shown: a wrong figure is worse than none."""

from __future__ import annotations

# Dense bf16 TFLOP/s by a part of the name that CUDA reports, from the makers' data sheets. First match wins.
_BF16_TFLOPS = (
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("GH200", 989.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("RTX 4090", 165.0),
)


def peak_flops(device_name: str) -> float | None:
    """bf16 FLOP/s that the device could do at most; None where we do not know."""
    return next((tflops * 1e12 for part, tflops in _BF16_TFLOPS if part in device_name), None)
