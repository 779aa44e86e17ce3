"""GGUF files: a model in one file, shown to all of Baton as a folder in Hugging Face layout.

Torch-free and numpy-free, as the router reads them too; the tensors are read by
`models/loading/gguf_weights.py`.
"""
