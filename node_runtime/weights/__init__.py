"""Changes the weights of a running node, between two steps, after it has left the routers."""
