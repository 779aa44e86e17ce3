"""LoRA adapters for a model's layers: target layers, products, steps with several adapters."""
