"""CUDA graphs of steps with prompts, one graph per layer: their inputs and their replay."""
