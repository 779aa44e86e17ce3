"""Guesses of next tokens by what has weights, made where the model's steps are computed."""
