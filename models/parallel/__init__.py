"""One model over several ranks: each rank's part of the model, and how ranks communicate.

Refuses to know: what is computed, where ranks run, who starts ranks.
"""
