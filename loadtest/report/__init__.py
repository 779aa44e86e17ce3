"""Reports of runs, made from the records of their requests: figures, verdicts, tables, JSON."""
