"""The decode node (program 3): receives KV blocks, and decodes in continuous batches."""
