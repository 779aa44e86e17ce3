"""A plug-in of every kind for Baton. Each module has one entry point of pyproject.toml."""
