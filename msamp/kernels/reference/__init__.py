"""Reference twins: the arithmetic of the kernels in plain torch, on any device."""
