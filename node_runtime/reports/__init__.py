"""What a node reports: metrics, views for operators, and the contents of its prefix cache."""
