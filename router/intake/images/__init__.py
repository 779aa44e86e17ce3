"""Images of prompts at the router: their limits, and the sizes in their files' headers."""
