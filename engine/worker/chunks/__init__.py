"""Steps with prompts as CUDA graphs, one per layer: their inputs, and their replay."""
