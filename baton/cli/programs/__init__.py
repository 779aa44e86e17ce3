"""Commands that run Baton's programs; each program's dataclass declares the command's options."""
