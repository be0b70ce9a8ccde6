"""What is kept of sequences: their beginnings, for requests that begin alike."""
