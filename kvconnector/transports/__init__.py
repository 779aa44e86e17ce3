"""Transports: copy bytes between nodes by NIXL, TLS sockets or memory, with optional faults."""
