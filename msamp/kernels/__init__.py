"""The operations that touch every element, such as casts and GEMMs: each a reference twin in plain torch and, on a GPU, a Triton kernel."""
