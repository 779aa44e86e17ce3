"""From logits to tokens: penalties, grammars, noise, samplers, log-probabilities."""
