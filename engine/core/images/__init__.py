"""Images for the scheduler: which encodings exist, and which images a step encodes. No torch."""
