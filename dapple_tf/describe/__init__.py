"""Clusters, plans and profiles: data that is checked on construction, and its JSON. Nothing here runs anything."""
