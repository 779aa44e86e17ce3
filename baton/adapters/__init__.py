"""Adapters: find, check and read LoRA adapters in the file formats of PEFT and llama.cpp."""
