"""What people look at after a run: a table, a picture, a CSV, and a card beside every model."""
