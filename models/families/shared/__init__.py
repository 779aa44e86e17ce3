"""Parts of config.json that several families share."""
