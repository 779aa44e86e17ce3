"""The parts that networks are made of; parameter names are those of Hugging Face checkpoints."""
