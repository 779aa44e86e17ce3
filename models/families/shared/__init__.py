"""Readers of config.json fields and GGUF metadata that several families share."""
