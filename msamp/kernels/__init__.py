"""What touches every element: casts and GEMMs, each a reference twin in plain torch and, on a GPU, a Triton kernel."""
