"""Communication of gradients and weights: scaling, accumulation, exchange, and counting of bytes."""
