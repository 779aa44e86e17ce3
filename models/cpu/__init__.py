"""Speed on CPUs: packed weights, and tapes of decode steps."""
