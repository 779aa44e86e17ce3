"""From clients' requests to checked calls, and from tokens to text; shared by all APIs."""
