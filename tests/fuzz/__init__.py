"""Random programs, and what must be true of each of them."""
