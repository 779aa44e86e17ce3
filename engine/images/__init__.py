"""Pixel values: separate processes, which may crash, decode image files before requests run."""
