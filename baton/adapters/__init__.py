"""Adapters: LoRA adapters in PEFT's layout, checked and named by the digest of their content."""
