"""Images per second on 1, 2, 4 and 8 towers, and where a step's time goes.

`make scaling-speed` runs it. `measure` times and traces one cell in a process of its own,
`trace_split` reads the trace, `__main__` goes through the cells, `report` prints and draws.
"""
