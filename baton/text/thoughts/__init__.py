"""Thoughts before answers: find their marks, and follow an output through its thought."""
