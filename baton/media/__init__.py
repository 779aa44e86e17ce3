"""Images in prompts: the tokens of an image, by model and image size; needs no torch."""
