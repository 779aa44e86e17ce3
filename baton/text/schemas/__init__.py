"""Schemas: rewrites JSON schemas so that the grammar library enforces them."""
