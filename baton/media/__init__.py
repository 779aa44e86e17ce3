"""Images in prompts: find out which tokens an image has in a model's prompts, without torch."""
