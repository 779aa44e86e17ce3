"""Runs checked calls: places them, tries and retries them, streams in order. Knows no API."""
