"""Parts that all servers share: connections, the gate of calls, errors, metrics pages."""
