"""Transports: copy bytes between nodes by NIXL, by TLS sockets, or in one process's memory."""
