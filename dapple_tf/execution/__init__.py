"""Step graphs in a session: built, run, and going on when workers are lost; and where values are meanwhile."""
