"""Questions about a finished graph, and edits of it.

In come operations and tensors; out come operations, names and truth values, and nothing of a tower
or a request is known here. Read `op_types` (which types of operations mean what), `graph_walk`
(what depends on what), `edit` (colocation, functions), `variable_access` and `function_variables`
(what reads and writes a variable), `order` (what waits for what, through loops and branches), then
`waits` (which writes are made to wait for which reads). `same_value` and `import_again` stand
alone.
"""
