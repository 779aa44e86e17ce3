"""LoRA adapters of a node: commands wait for them here, and operators load and pin them."""
