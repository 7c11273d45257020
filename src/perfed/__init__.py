"""perfed."""
