"""`baton admin`: commands of operators, which call a router's `Admin` service."""
