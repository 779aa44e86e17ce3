"""Turns a prefill or decode node into a process: threads, engine loop, metrics, router events."""
