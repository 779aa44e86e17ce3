"""Images in prompts, as all programs know them: no torch, no decoding."""
