"""Kernels in C++ for f32 on a CPU: where torch makes several passes, or is made for larger tensors."""
