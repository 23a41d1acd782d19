"""A step's memory: the account, the measurement, the largest batch, and advice when it runs out."""
