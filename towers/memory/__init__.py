"""Where a step's memory goes: the account, the measurement, what fits, and what if it does not."""
