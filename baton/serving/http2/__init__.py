"""Protect a gRPC server: accept its connections, and limit the HTTP/2 frames that reach it."""
