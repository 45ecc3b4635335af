"""Write a tiny random chat model, to try `trl_tuning.py` and `ppo.py` on a CPU in seconds: python examples/toy_chat.py FOLDER

A Llama with two layers, a byte tokenizer and a chat template, as `from_pretrained` reads them.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKS = ("<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and one per mark of the template."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_.decoder = decoders.ByteLevel()
    bytes_.add_special_tokens(list(MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE)


def make(folder: Path, *, hidden: int = 64, layers: int = 2, seed: int = 0) -> None:
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    make(folder)
    print(f"{folder}: a chat model")


if __name__ == "__main__":
    main()
