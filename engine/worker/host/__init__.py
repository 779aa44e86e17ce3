"""The host of a worker: cores and memory. Refuses to know: tensors."""
