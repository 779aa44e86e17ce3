"""The host of a worker: its CPU cores and its memory. Refuses to know: tensors."""
