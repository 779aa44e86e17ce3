"""`baton doctor` and `baton plugins`: what this machine and its packages offer, with advice."""
