"""The `baton` command: its sub-commands, options and output."""
