"""The GPT model: megatron-core's GPTModel with our linear layers, norms, attention and loss in its `ModuleSpec` slots."""
