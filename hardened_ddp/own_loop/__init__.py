"""Protection for a training loop of the user's own: read protect.py first."""
