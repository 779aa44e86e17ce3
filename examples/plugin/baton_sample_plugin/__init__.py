"""A sample plug-in of each kind. pyproject.toml has an entry point for each module."""
