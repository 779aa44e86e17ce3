"""Names: what clients may call models, and the base models behind the names."""
