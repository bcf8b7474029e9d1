"""Tasks: what they are, their sources, generators, caches and batches. Knows no other wing."""
