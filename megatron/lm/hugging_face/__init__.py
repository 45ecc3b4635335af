"""Folders of Hugging Face, which may come from anywhere: read without running their code or leaving the folder.

folder.py      safetensors and JSON files
config_file.py config.json
models.py      models and tokenizers of transformers
"""
