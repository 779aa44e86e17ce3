"""Checkpoints: read all files of a model but the values of its weights."""
