"""The processes of a run: rendezvous, process groups, the grid of ranks, and megatron-core on a CPU."""
