"""Names that clients may give as models, and the base models that the names stand for."""
