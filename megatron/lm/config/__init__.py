"""Settings of a training run: ten frozen dataclasses and `Config`, which contains one of each.

`schema` defines how a setting is declared, one file per subject declares the settings, `cli` turns them into flags, and `check` validates
them with the `rules`.
"""

from megatron.lm.config.model import ModelConfig
from megatron.lm.config.outputs import LATEST_CHECKPOINT_FILE, CheckpointConfig, FaultConfig, LoggingConfig, ProfilingConfig
from megatron.lm.config.parallel import CommunicationConfig, ParallelConfig
from megatron.lm.config.precision import COAT_FORMATS, FP8_FORMATS, LINEARS, OPT_LEVELS, PrecisionConfig
from megatron.lm.config.schema import Interval, flag, setting
from megatron.lm.config.training import DEFAULT_SPLIT, TOKENIZERS, DataConfig, OptimizerConfig, TrainingConfig
from megatron.lm.config.whole import Config

__all__ = [
    "COAT_FORMATS",
    "DEFAULT_SPLIT",
    "FP8_FORMATS",
    "LATEST_CHECKPOINT_FILE",
    "LINEARS",
    "OPT_LEVELS",
    "TOKENIZERS",
    "CheckpointConfig",
    "CommunicationConfig",
    "Config",
    "DataConfig",
    "FaultConfig",
    "Interval",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ProfilingConfig",
    "TrainingConfig",
    "flag",
    "setting",
]
