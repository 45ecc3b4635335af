"""Watch training runs while they are written: loss, tokens/s, and underflow by layer.

    msamp watch runs/quickstart                      every run in the folder, on the terminal
    msamp watch runs/quickstart --page watch.html    also as a page that reloads itself in a browser
    msamp watch runs/quickstart --once               print it once

It reads what the trainer writes with --metrics-file, and with --record-precision in the same folder, and writes nothing but the page. The
training may run on another machine that shares the folder. It ends with Ctrl-C, or when every run has completed; into a pipe or file it
prints once. A page of a machine without a browser can be served from its folder by `python -m http.server --bind 127.0.0.1`.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.lm.shell import arguments, exit_codes
from megatron.lm.shell.terminal import Part, fitted, show
from megatron.lm.tools.watch.page import write_page
from megatron.lm.tools.watch.run_files import MOST_RUNS, WatchedRun, runs_below
from megatron.lm.tools.watch.screen import ASCII_BLOCKS, BLOCKS, Line, screen
from megatron.lm.tools.watch.status import Status, status

CLEAR = "\x1b[H\x1b[2J"


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("run", type=arguments.path, help="folder of one or several runs, or a file of --metrics-file")
    parser.add_argument("--page", type=arguments.output_file, metavar="FILE", help="HTML file to write each time")
    parser.add_argument("--interval", type=arguments.count(1, 3600), default=2, help="seconds between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="look once and leave")
    args = parser.parse_args(argv)
    if args.page is not None and args.page.suffix not in (".html", ".htm"):
        raise ValueError(f"--page {args.page} must end in .html, so that no file of a run is overwritten")
    watch = Watch(args.run, args.page, args.interval)
    once = args.once or not sys.stdout.isatty()
    while watch.look(stays=once) and not once:
        time.sleep(args.interval)


class Watch:
    """Look at the runs below a path, again and again.

    Args:
        path: of a folder or metrics file.
        page: HTML file to write, or None.
        interval: seconds between two looks.
    """

    def __init__(self, path: Path, page: Path | None, interval: int) -> None:
        self.path, self.page, self.interval = path, page, interval
        self._runs: dict[Path, WatchedRun] = {}

    def look(self, *, stays: bool) -> bool:
        """Show the runs as they are now, and write the page; return whether one of them may still change.

        Args:
            stays: keep what the terminal shows, and write a page that does not reload.
        """
        runs, left_out = self._newest()
        for run in runs:
            run.update()
        now = time.time()
        statuses = [status(run, now) for run in runs]
        goes_on = not runs or any(state.word != "completed" for state in statuses)
        lines = self._lines(runs, statuses, left_out, live=goes_on and not stays)
        if not stays:
            print(CLEAR, end="")
            lines = lines[: shutil.get_terminal_size().lines - 2]  # what is above would scroll away
        for line in lines:
            show(fitted(line))
        if self.page is not None:
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            write_page(self.page, runs, statuses, written, self.interval if goes_on and not stays else None)
        return goes_on

    def _newest(self) -> tuple[list[WatchedRun], int]:
        """Return the runs to show, which keep what earlier calls have read of them, and the number of older runs that are left out."""
        runs = runs_below(self.path)
        for run in runs:
            kept = self._runs.setdefault(run.metrics, run)
            kept.name, kept.record, kept.unclear = run.name, run.record, run.unclear
        shown = sorted(runs[-MOST_RUNS:], key=lambda run: run.name)
        return [self._runs[run.metrics] for run in shown], len(runs) - len(shown)

    def _lines(self, runs: Sequence[WatchedRun], statuses: Sequence[Status], left_out: int, *, live: bool) -> list[Line]:
        how = f"every {self.interval} s, Ctrl-C leaves" if live else "looked at once"
        lines: list[Line] = [[Part(f"{self.path}  {time.strftime('%H:%M:%S')}  {how}", "dim")], [Part("")]]
        if not runs:
            lines.append([Part(f"no run in {self.path} yet: a trainer with --metrics-file in this folder appears here", "yellow")])
        if left_out:
            lines.append([Part(f"{left_out} runs written before these {len(runs)} are not shown: give the folder of one", "yellow")])
        if self.page is not None:
            lines.append([Part(f"page: {self.page}", "dim")])
        return lines + screen(runs, statuses, _blocks())


def _blocks() -> str:
    """Return the blocks of a curve that stdout can encode."""
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return ASCII_BLOCKS
    return BLOCKS


if __name__ == "__main__":
    sys.exit(main())
