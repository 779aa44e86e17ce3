"""GGUF files: a model in one file, shown to other code as a folder in Hugging Face layout.

Imports neither torch nor numpy, because the router reads GGUF files too;
`models/loading/gguf_weights.py` reads the tensors.
"""
