"""The encode node (program 4): encodes images, and sends the encodings to prefill nodes."""
