"""LoRA adapters beside a model's linear layers: targets, products, steps with several."""
