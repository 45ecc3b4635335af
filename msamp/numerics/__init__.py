"""What the numbers mean: formats, scales, casts and metrics in plain torch. No ranks, no kernels."""
