"""Jobs of plain megatron-core in processes without this repository (`plain_megatron.py`)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PROGRAM = Path(__file__).with_name("plain_megatron.py")
# megatron-core decorates functions with torch.compile. Each process imports the compiler for that, 1.9 s, and compiles them when called.
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}


def job(what: str, folder: Path, cases: dict[str, dict[str, Any]], processes: int = 1, site: str | None = None) -> None:
    """Run `plain_megatron.py` in so many processes; AssertionError with the end of its output where one fails.

    `site`: a folder of packages, such as Transformer Engine's, that are not installed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    about = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"} | UNCOMPILED
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK", "LOCAL_RANK")} | about
    environment |= {"PYTHONPATH": site} if site else {}
    # -P: the folder of the program is not searched for modules; -s: nor the user's.
    command = [sys.executable, "-P", "-s", "-W", "ignore", str(PROGRAM), what, str(folder), json.dumps(cases)]
    ranks: list[dict[str, str]] = [{"RANK": str(rank)} for rank in range(processes)] if torch.cuda.is_available() else [{}]
    started = [
        subprocess.Popen(
            command, env=environment | rank, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        for rank in ranks
    ]
    try:
        texts = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):  # nobody of it is left
                os.killpg(process.pid, signal.SIGKILL)
    assert all(process.returncode == 0 for process in started), "\n".join(text[-3000:] for text in texts)
