"""Parts of an input batch: a step as columns, rows of requests, host buffers, states, images."""
