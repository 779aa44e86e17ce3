"""`baton doctor` and `baton plugins`: check this machine and its packages, and give advice."""
