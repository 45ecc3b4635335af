"""What is trained besides the model: the state of a run, its optimizer, the gradient all-reduce, its health and its identity."""
