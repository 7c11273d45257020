"""One round as the server sees it."""
