"""The GPT model: megatron-core's transformer block with our linear layers, norms, attention and loss in its `ModuleSpec` slots."""
