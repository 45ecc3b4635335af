"""One optional file per host: the two-line entry into a plain PyTorch loop, and what other trainers need."""
