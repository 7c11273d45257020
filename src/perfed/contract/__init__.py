"""The contract that every method keeps, as checks that run on any method file."""
