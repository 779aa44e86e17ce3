"""A checkpoint's settings for embeddings, scores and labels, read from its files."""
