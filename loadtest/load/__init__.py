"""The load: prompts, traces, arrival times, and the player that sends requests."""
