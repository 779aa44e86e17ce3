"""What a process tells of itself: logs, the ledger, counts, stacks."""
