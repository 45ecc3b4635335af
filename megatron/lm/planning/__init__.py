"""What a step costs on a cluster, predicted from shapes and measured rates: `megatron.lm.tools.plan` shows it. Needs no GPU.

rates     the measured rates, `rates.csv`, and their scaling to another GPU
wire      bytes that a rank sends in a step, by kind
step      time of a step, by kind
search    the grids that fit, best first

Memory is `megatron.lm.planning.memory`'s.
"""
