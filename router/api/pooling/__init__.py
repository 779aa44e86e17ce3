"""HTTP API of pooled requests: embeddings, rerank, score and classify."""
