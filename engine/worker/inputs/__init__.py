"""The parts of an input batch: a step as columns, rows of requests, buffers, states."""
