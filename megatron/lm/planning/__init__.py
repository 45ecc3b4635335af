"""Predict memory and time of a step on a cluster, from shapes and measured rates, for `msamp plan`. Needs no GPU.

memory, experts        bytes on each rank, of layers with experts
fits                   what a dry run prints and refuses
rates                  a cluster, and the measured rates of its GPUs, `rates.csv`
wire                   bytes that a rank sends per step, by kind
time, expert_time      time of a step, by kind
search                 the grids that fit, fastest first
"""
