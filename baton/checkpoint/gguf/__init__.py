"""GGUF files: makes a model that is one file usable as a folder in Hugging Face layout.

Imports neither torch nor numpy, because the router reads GGUF files too;
`models/loading/gguf_weights.py` reads the tensors.
"""
