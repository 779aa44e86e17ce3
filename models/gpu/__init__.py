"""Smaller models on GPUs: weights of 4 and 8 bits."""
