"""Where a run computes: how its processes meet, their groups and grid, and the CPU as a device for megatron-core."""
