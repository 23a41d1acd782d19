"""Where a step's memory goes: the account, the measurement, what fits, and what to do when it does not."""
