"""What follows a failed attempt: blame, retries and their limits, trials of suspect calls."""
