"""Memory for encodings of images, divided into units; encode nodes and prefill nodes have it."""
