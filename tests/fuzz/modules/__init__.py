"""Random modules, written as people write them, and what must be true of each of them."""
