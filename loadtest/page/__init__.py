"""Figures and one HTML page of a load test's result, made only from the result's JSON."""
