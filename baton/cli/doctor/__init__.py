"""`baton doctor`: checks whether this machine suits Baton, with advice for problems."""
