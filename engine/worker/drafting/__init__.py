"""Drafters with weights, which make drafts in the worker, beside the model."""
