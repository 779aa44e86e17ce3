"""`baton admin`: what operators ask and change, through a router's `Admin` service."""
