"""The Native Sparse Attention operator: functions of tensors, on a PyTorch reference or Triton kernels."""
