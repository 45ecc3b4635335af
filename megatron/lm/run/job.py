"""The trainer's command: check the configuration, then print the memory plan (`--dry-run`) or train."""

import os
from collections.abc import Sequence
from functools import partial

from megatron.lm.config import CheckpointConfig, Config, PrecisionConfig
from megatron.lm.config.cli import parse
from megatron.lm.config.from_checkpoint import Saved
from megatron.lm.config.rules.check import check
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
    from megatron.lm.planning import fits

    if not config.logging.dry_run:
        fits.check_machine(config, world_size)
        return config
    fits.dry_run(config, world_size, partial(_saved_precision, config.checkpoint))
    return None


def _saved(settings: CheckpointConfig) -> Saved | None:
    """Return the settings of the checkpoint that this start loads."""
    from megatron.lm.run.start import saved_settings  # megatron-core, for seconds

    return saved_settings(settings)


def _saved_precision(settings: CheckpointConfig) -> PrecisionConfig | None:
    """Return the precision settings of the checkpoint that this start resumes, and print on rank 0 which one it is."""
    if settings.load is None:
        return None
    from megatron.lm.checkpoint import saved_precision  # megatron-core, for seconds
    from megatron.lm.run.start import with_checkpoint

    resolved, line = with_checkpoint(settings)
    if line is not None and os.environ.get("RANK", "0") == "0":
        print(line)
    return saved_precision(resolved)


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or not 1 <= int(text) <= MOST_PROCESSES:
        raise ValueError(
            f"WORLD_SIZE is {text!r}; it must be a number of processes in [1, {MOST_PROCESSES}]: start with torchrun, or unset it to train "
            "on one"
        )
    return int(text)
