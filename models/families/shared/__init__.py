"""Ways to write a config.json that several families share."""
