"""`baton doctor`: checks what this machine offers Baton, with advice for problems."""
