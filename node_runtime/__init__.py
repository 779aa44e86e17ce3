"""What makes a prefill or decode node a process: threads, engine loop, collector, events."""
