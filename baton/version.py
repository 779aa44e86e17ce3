"""The version of Baton."""

__version__ = "0.1.0"
