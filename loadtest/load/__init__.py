"""What is sent and when: prompts, traces, arrivals, and the player that sends it."""
