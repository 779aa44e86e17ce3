"""Turns clients' requests into checked calls, and tokens into text; shared by all APIs."""
