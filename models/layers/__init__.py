"""The layers of networks; parameter names are those of Hugging Face checkpoints."""
