"""The status page: what the router knows of its fleet and its requests, as HTML. Reads only."""
