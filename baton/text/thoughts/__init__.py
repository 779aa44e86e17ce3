"""Thoughts before answers: their marks, and an output's position in its thought."""
