"""KV blocks through NIXL."""
