"""The router's admin service, by which operators see and change its state."""
