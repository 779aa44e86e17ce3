"""What a process reports: logs, traces, metrics, its ledger of KV blocks, and stack samples."""
