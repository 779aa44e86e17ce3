"""Who may call, join and listen: keys, certificates, TLS, the audit log."""
