"""The transport over TLS 1.3 and TCP, for networks that are not trusted."""
