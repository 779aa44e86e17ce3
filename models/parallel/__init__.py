"""One model over several ranks: what each keeps of it, and what they tell each other.

Refuses to know: what is computed, where ranks run, how they are started.
"""
