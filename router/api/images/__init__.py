"""Reads the image files of HTTP requests from data URLs, or from hosts that the operator lists."""
