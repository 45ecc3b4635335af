"""What a trained model is worth: bits a byte of a text, and tasks through lm-eval; `megatron.lm.tools.evaluate` is the command."""
