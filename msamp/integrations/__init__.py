"""Entry points: `msamp.initialize` for a PyTorch loop, and one optional file per host framework."""
