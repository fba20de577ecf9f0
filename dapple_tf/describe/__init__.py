"""Clusters, plans and profiles: data that is checked when it is made, and its JSON. Nothing here runs anything."""
