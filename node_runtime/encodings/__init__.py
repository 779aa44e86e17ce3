"""What encode nodes and prefill nodes share: memory for encodings of images, and its units."""
