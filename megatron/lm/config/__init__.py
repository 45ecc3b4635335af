"""Settings of a training run: ten frozen dataclasses and `Config`, which contains one of each.

`sections` declares the settings, one file per subject, `whole` joins them to `Config`, `cli` turns them into flags, `megatron_flags` treats
those of Megatron-LM that have another meaning here, and `rules` validates combinations of settings.
"""

from megatron.lm.config.sections.model import ModelConfig
from megatron.lm.config.sections.outputs import LATEST_CHECKPOINT_FILE, CheckpointConfig, FaultConfig, LoggingConfig, ProfilingConfig
from megatron.lm.config.sections.parallel import CommunicationConfig, ParallelConfig
from megatron.lm.config.sections.precision import LINEARS, OPT_LEVELS, PrecisionConfig
from megatron.lm.config.sections.schema import Range, flag
from megatron.lm.config.sections.training import DEFAULT_SPLIT, TOKENIZERS, DataConfig, OptimizerConfig, TrainingConfig
from megatron.lm.config.whole import Config

__all__ = [
    "DEFAULT_SPLIT",
    "LATEST_CHECKPOINT_FILE",
    "LINEARS",
    "OPT_LEVELS",
    "TOKENIZERS",
    "CheckpointConfig",
    "CommunicationConfig",
    "Config",
    "DataConfig",
    "FaultConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ProfilingConfig",
    "Range",
    "TrainingConfig",
    "flag",
]
