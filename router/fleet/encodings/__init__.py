"""Which nodes encode the images of prompts, and what attempts ask of encode nodes."""
