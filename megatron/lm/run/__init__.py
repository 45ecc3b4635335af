"""A run from its first step to its last: the loop, what it tells, and what it does about faults.

job.py          what the command does: judges, plans or trains
start.py        how it starts: anew, from where it was, or as the child of another
trainer.py      drives it: train, evaluate, log, save
step_watch.py   looks at every step after it: skipped steps, spikes, requests, and what all ranks do about them
replicas.py     whether all copies of the weights are the same, now and then
spikes.py       losses that leave the mean of those before by too much
signals.py      what a process is asked to do from outside: signals, the clock
rollback.py     the way back to its newest healthy checkpoint
watchdog.py     which rank is stuck
reports/        what it reports: metrics (log line, TensorBoard, metrics file), recorder (the precision record), lost_updates (a warning
                where rounding the master weights loses most updates), amax_outliers (scales held down by one large amax)
"""
