"""Adapters: LoRA adapters of PEFT and llama.cpp, checked, and named by their content's digest."""
