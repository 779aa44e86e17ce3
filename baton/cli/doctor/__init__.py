"""`baton doctor`: what this machine can do for Baton, with one line of advice for what is wrong."""
