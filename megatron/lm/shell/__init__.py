"""How commands behave in a shell: flags, files, logs, exit codes and signals. Nothing here imports torch when it is imported."""
