"""The program of train.py: its flags, its data, its job, and the results it makes.

A command line comes in, and is checked before TensorFlow is imported. Out go a folder with
checkpoints, metrics and summaries, lines on the screen, and an exit status.

Read `flags` (all settings, a table), `command_line` and `contradictions` (what is refused), then
`arguments` (flags as arguments of `towers`) and `job` (the graph of a run). `training` runs the
job, with the `hooks` around its steps: `progress` shows it, `metrics_log` and `run_settings` write
its files, `best` evaluates it. `results` makes evaluations, predictions and exports of a
checkpoint. `trials` and `rate_finder` run steps whose weights nobody keeps; `sweep` starts several
runs. docs/architecture.md has the table of which module imports which.
"""
