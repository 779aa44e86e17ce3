"""Authentication and protection: API keys, certificates, TLS, exposed addresses, audit log."""
