"""Runs checked calls: places them on nodes, retries them, streams tokens in order. Knows no API."""
