"""Commands that run Baton's programs; the options are declared in each program's dataclass."""
