"""Vision encoders: images' pixel values become embeddings of a text network's placeholders."""
