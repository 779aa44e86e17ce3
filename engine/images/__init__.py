"""Pixel values of images: separate processes, which may crash, decode the image files."""
