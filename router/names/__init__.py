"""Names that clients may give for models, and the base models behind the names."""
