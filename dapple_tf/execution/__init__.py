"""Step graphs in a session: building and running them, surviving lost workers, and keeping track of values."""
