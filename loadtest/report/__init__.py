"""What is made of the records: figures, intervals, verdicts, tables."""
