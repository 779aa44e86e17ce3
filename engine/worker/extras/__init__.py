"""Work of a step beside its tokens: encodings of images, and numbers of pooled prompts."""
