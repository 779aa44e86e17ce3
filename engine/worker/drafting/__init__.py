"""Drafters with weights, which make drafts in the worker that runs the model."""
