"""What every server of ours has: connections, the gate of its calls, errors, metrics pages."""
