"""LoRA adapters beside a model's layers: targets, products, steps with several."""
