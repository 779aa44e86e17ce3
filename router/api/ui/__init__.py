"""The status page: the router's fleet and requests as HTML. Read-only."""
