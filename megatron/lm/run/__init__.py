"""A run from start to end: the training loop, its reports, and fault handling.

job.py          the trainer's command: check, plan or train
start.py        start from scratch, resume, or start a child of another run
trainer.py      the training loop: train, evaluate, log, save
data.py         tokenizer, datasets and batches
announce.py     what a run prints at its start
step_watch.py   check every step: skipped steps, loss spikes, requests, damaged copies, and what all ranks do about them
signals.py      requests from outside: signals, the time limit
rollback.py     roll back to the newest healthy checkpoint
watchdog.py     detect the rank that is stuck
reports/        metrics (log line, TensorBoard, metrics file), recorder (the precision record), lost_updates (a warning if rounding of
                master weights loses most updates)
"""
