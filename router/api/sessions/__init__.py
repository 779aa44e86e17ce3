"""HTTP calls that keep or drop a session's cached prefix between two of its requests."""
