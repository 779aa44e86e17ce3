"""Settings of a checkpoint for embeddings, scores and labels, and the answers made with them."""
