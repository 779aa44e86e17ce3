"""Reports of a process: logs, traces, metrics, its ledger of KV blocks, and stack samples."""
