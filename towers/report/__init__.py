"""A step as a page: where its time and its memory go, and what to change.

In come finished towers and the `tf.RunMetadata` of one step; out goes one HTML file. Nothing in the
graph changes. Read `parts` (what each operation is for), `trace` (what ran when), `time_use`,
`chain` and `verdict`; then `memory_curves`, `variable_rows`, `page`, `step_report` and `hook`.
"""
