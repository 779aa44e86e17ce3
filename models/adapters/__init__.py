"""LoRA adapters for a model's layers: target layers, low-rank products, steps with several
adapters.
"""
