"""Program 3: receives KV blocks and decodes in continuous batches."""
