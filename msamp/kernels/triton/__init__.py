"""Triton kernels. Each file and function has its twin of the same name in `msamp.kernels.reference`."""
