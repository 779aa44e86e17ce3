"""What a request may ask and what it answers, as plain values: what users import."""
