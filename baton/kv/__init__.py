"""Describe KV blocks: their hashes, the layers in them, and the manifest that nodes exchange."""
