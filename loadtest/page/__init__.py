"""The result of a load test as figures and as one HTML page, made from the JSON alone."""
