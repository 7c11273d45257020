"""The papers' tables, one command each: what was run there, run again, and both side by side."""
