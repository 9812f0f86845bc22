"""Messages become rows: payloads are decoded in tasks by the schema of their topic, and those that fail are kept apart."""
