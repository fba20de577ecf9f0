"""Variables on the devices that keep them: which those are, and how values get there and back."""
