"""The result of a load test as pictures and as one HTML page; all of it is made of the JSON."""
