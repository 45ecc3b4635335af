"""The lines of the table, one file per subject, and what a line contains (`row`)."""
