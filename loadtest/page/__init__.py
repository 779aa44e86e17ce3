"""A load test's result as figures and one HTML page, made only from the result's JSON."""
