"""Memory for encodings of images, and its units, for encode nodes and prefill nodes."""
