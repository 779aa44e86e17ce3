"""Requests and their scheduling: scheduler, waiting room, block pool, KV manager; no tensors."""
