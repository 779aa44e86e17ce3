"""HTTP calls about a session that a client names, between two of the session's requests."""
