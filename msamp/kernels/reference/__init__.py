"""Reference twins: the kernels' arithmetic in plain torch, on any device."""
