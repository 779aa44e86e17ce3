"""Requests and when they compute: scheduler, waiting room, block pool, KV manager. No tensor."""
