"""What a step computes besides tokens, and the exchange of sampled tokens between ranks."""
