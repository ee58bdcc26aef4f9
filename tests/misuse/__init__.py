"""A table of misuse and of hostile files: each row a situation, and what its error must say.

A row is a name, a function that makes the situation in a room of its own, and a pattern of the message. Each ends in an
error of ours that has a cure, leaves no file behind, and takes seconds and little memory at most. A module for each
family; ``test_misuse.py`` runs all of them.
"""
