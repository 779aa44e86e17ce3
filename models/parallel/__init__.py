"""One model on several ranks (processes): each rank's part, and how ranks communicate.

Refuses to know: what is computed, where ranks run, who starts ranks.
"""
