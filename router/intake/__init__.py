"""Turns clients' requests into checked calls, and output tokens into text, for all APIs."""
