"""What a step computes besides tokens: encodings of images, and results of pooled prompts."""
