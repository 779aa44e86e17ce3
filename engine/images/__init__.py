"""Pixel values: image files are decoded in processes that may die, before requests are computed."""
