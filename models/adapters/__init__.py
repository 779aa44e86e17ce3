"""LoRA adapters: the layers they change, their products, and steps that use several adapters."""
