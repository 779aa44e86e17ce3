"""Where a router listens, and where its clients look for it, unless told otherwise."""

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"
