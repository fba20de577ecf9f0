"""Plans: what they say, what they cost, and how the best one is found."""
