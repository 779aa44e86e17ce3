"""Drafters with weights, which make drafts where the model's steps are computed."""
