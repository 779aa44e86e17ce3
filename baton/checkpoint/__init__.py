"""Checkpoints: read a model's folder or file, apart from its weights."""
