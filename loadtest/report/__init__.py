"""Reports made from the records: figures, intervals, verdicts, tables."""
