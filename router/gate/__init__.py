"""What the router takes on now, what waits, what is refused. Knows no placement."""
