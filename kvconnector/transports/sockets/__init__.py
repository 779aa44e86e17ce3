"""KV blocks through TLS 1.3 over TCP, for networks that are not trusted."""
