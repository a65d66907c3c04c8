"""The Native Sparse Attention operator: functions of tensors, on a PyTorch reference or Triton kernels.

Start with reference.py, one function per equation, and operator.py, the public functions.
"""
