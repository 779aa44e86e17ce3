"""Thoughts before answers: the marks around them, and where an output is in one."""
