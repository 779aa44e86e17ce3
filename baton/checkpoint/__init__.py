"""Checkpoints: read all files of a model, except the values of its weights."""
