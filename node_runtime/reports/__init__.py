"""What a node tells others about itself: metrics, views for operators, and cached contents."""
