"""Decides what follows a failed attempt: which node to blame, retries, trials of suspect calls."""
