"""Element-wise operations, casts and GEMMs. Each has a reference twin in plain torch, and for GPUs a Triton kernel or a library call."""
