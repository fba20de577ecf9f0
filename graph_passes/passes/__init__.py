"""The passes, a file each, and what only they use."""
