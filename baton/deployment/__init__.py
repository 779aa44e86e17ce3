"""Start a router and its nodes as processes on this machine, or where Ray places the nodes."""
