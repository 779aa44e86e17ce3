"""Images in the scheduler: which encodings are cached, and which images a step encodes.

No torch.
"""
