"""What a process reports about itself: logs, traces, a ledger of KV blocks, stack samples."""
