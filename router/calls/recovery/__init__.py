"""What becomes of a call after an attempt failed. Nearly no call needs any of it."""
