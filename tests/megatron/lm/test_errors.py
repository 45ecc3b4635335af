"""A run that stops is not a refused command line: its command ends with another exit code."""

from megatron.lm.errors import RunStopped
from megatron.lm.shell import exit_codes


def test_a_stopped_run_ends_with_its_own_exit_code_and_its_words(capsys):
    @exit_codes.command
    def main() -> None:
        raise RunStopped("the loss is not finite")

    assert main() == exit_codes.STOPPED
    assert "the loss is not finite" in capsys.readouterr().err
