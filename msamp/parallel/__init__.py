"""How optimizer states, gradients and weights are spread over ranks."""
