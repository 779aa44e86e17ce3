"""Steps with prompts as CUDA graphs, one for each layer: their inputs, and their replay."""
