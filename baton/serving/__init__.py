"""Parts that all servers share: connections, checks of calls, errors, metrics pages."""
