"""Vision encoders, which turn the pixels of an image into embeddings for the text model."""
