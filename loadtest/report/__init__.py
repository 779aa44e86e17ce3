"""Reports made from records: figures, intervals, verdicts, tables."""
