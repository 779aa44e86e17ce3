"""Images in prompts: their tokens by model and size, without torch and without decoding."""
