"""Images of prompts on the router: limits, and reading an image's size from its file's header."""
