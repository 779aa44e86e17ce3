"""GGUF files: a model in one file, presented as a folder in Hugging Face layout.

Without torch and numpy, since the router reads them too; `models/loading/gguf_weights.py` reads the
tensors.
"""
