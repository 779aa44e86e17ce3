"""What a model's folder or file says of itself, without reading its weights."""
