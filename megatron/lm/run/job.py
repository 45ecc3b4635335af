"""The trainer's command: check the configuration, then print the memory plan (`--dry-run`) or train."""

import os
from collections.abc import Sequence

from megatron.lm.config import CheckpointConfig, Config, PrecisionConfig
from megatron.lm.config.cli import parse
from megatron.lm.config.from_checkpoint import Saved
from megatron.lm.config.rules.check import check
from megatron.lm.config.sections.precision import MEASURED
from megatron.lm.run.reports.log_line import wrapped
from megatron.lm.shell.exit_codes import command

MOST_PROCESSES = 2**20


@command
def job(argv: Sequence[str] | None = None) -> int:
    """Run training with these flags and return the exit code of `entry`, or `--exit-code-unfinished` if the run was stopped early."""
    config = _judged(argv)
    if config is None:
        return 0
    # Imported here, because megatron-core takes seconds to import, and a refusal should not.
    from megatron.lm.processes import process_groups
    from megatron.lm.run.trainer import Trainer
    from megatron.lm.run.watchdog import leave_if_alone

    process_groups.initialize(config)
    try:
        try:
            trainer = Trainer(config)
        except Exception as error:
            leave_if_alone(error)
            raise
        unfinished = trainer.run()
    finally:
        process_groups.shutdown()
    return 0 if unfinished is None else config.training.exit_code_unfinished


def _judged(argv: Sequence[str] | None) -> Config | None:
    """Return the checked configuration; None after a dry run."""
    parsed = parse(argv, _saved)
    config, world_size = parsed.config, _world_size()
    check(config, world_size)
    if os.environ.get("RANK", "0") == "0" and parsed.lines:
        print("\n".join(map(wrapped, parsed.lines)), flush=True)
    if config.logging.dry_run:
        _dry_run(config, world_size)
        return None
    _check_resources(_hopeful(config), world_size)
    return config


def _hopeful(config: Config) -> Config:
    """Return the configuration with FP8 attention, which needs less memory, where `--attention-precision auto` is not decided yet."""
    undecided = config.precision.attention_precision == MEASURED and config.precision.named.fp8
    return config.with_attention("fp8") if undecided else config


def _saved(settings: CheckpointConfig) -> Saved | None:
    """Return the settings of the checkpoint that this start loads."""
    from megatron.lm.run.start import saved_settings  # megatron-core, for seconds

    return saved_settings(settings)


def _dry_run(config: Config, world_size: int) -> None:
    """Print the memory plan; raise a ValueError if a process needs more memory than its device has."""
    from megatron.lm.model import fp8_layers
    from megatron.lm.planning import fits, memory

    def saved() -> PrecisionConfig | None:
        from megatron.lm.checkpoint import saved_precision  # megatron-core, for seconds
        from megatron.lm.run.start import with_checkpoint

        resolved, line = with_checkpoint(config)
        if line is not None and os.environ.get("RANK", "0") == "0":
            print(line)
        return saved_precision(resolved)

    capacity, config = fits.device_memory(config.logging.device_memory_gib), fits.with_vocabulary(config)
    fits.check_weights(config, capacity)
    config, choice = fp8_layers.decide(config, None, saved if config.checkpoint.load else lambda: None)
    if os.environ.get("RANK", "0") == "0":
        print(fits.report(config, world_size))
        print("\n".join(filter(None, (fp8_layers.describe(config, choice), choice.attention))), flush=True)
    fits.check_fits(config, world_size, capacity)
    if os.environ.get("RANK", "0") == "0":
        print(f"fits into {capacity / memory.GIB:.1f} GiB; nothing was started", flush=True)


def _check_resources(config: Config, world_size: int) -> None:
    """Raise a ValueError if the run does not fit into this machine, before minutes of allocation."""
    import psutil
    import torch

    from megatron.lm.planning import fits

    host = psutil.virtual_memory().total
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    device = host / int(local) if local.isdecimal() and int(local) else host
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0).total_memory
    fits.check_fits(config, world_size, device, reserved=0)
    fits.check_data_order(config, world_size, host)


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or not 1 <= int(text) <= MOST_PROCESSES:
        raise ValueError(
            f"WORLD_SIZE is {text!r}; it must be a number of processes in [1, {MOST_PROCESSES}]: start with torchrun, or unset it to train "
            "on one"
        )
    return int(text)
