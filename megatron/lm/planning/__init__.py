"""Predict memory and time of a step on a cluster, from shapes and measured rates, for `megatron.lm.tools.plan`. Needs no GPU.

memory    bytes on each rank
rates     the measured rates, `rates.csv`, and their scaling to another GPU
wire      bytes that a rank sends per step, by kind
mixtures  memory and time of the layers with experts
time      time of a step, by kind
search    the grids that fit, fastest first
"""
