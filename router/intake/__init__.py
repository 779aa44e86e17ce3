"""From what a client sends to a checked call, from its tokens to text; alike for all APIs."""
