"""Command-line behavior: flags, files, logs, exit codes and signals. No module here imports torch at import time."""
