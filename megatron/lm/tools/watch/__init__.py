"""`msamp watch`: a live view of runs that the trainer is writing, on the terminal and as a page that refreshes.

`run_files` reads metrics files and precision records while they grow, `status` says in words what a run is doing, `screen` and `page` show
it, and `command` is the command line.
"""
