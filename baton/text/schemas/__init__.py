"""Schemas: JSON schemas in words that the grammar library enforces."""
