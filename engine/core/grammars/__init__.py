"""What the scheduler knows of grammars: a state per request, and masks between steps."""
