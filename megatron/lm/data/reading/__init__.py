"""Reading indexed datasets: the order of the samples, the tokens, and checks that all ranks and a resumed run read the same ones."""
