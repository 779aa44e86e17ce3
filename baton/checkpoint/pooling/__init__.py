"""What a checkpoint's files say about pooling: embeddings, scores and labels."""
