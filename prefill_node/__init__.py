"""The prefill node (program 2): computes prompts, pushes their KV blocks, samples token 1."""
