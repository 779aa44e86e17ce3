"""What makes a model quick on CPUs: packed weights, tapes of a decode step."""
