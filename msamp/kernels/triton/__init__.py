"""Triton kernels. Each file and function has a twin of the same name in `msamp.kernels.reference`."""
