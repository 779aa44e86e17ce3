"""`baton admin`: operators' commands, over a router's `Admin` service."""
