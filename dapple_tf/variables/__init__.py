"""Which devices keep which variables, and how values get there and back."""
