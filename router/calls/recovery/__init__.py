"""Decides what follows a failed attempt: blame, retries and limits, trials of suspect calls."""
