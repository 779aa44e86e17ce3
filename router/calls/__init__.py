"""Checked calls: placed, tried on nodes, tried again, streamed in order. Knows no API."""
