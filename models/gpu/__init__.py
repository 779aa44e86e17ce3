"""What makes a model small on GPUs: weights of 4 and 8 bits."""
