"""Checks of a build: the audit of its graph, and the comparison with one device.

In comes a finished build, or a model with a sample batch; out goes a report (`Audit`,
`TowersReport`) that says in lines what does not hold. Read `findings`, `gpu_kernels`, `audit`, and
`audit_step` (what the graph, and a step, say of the plan). Then read `comparison` and
`check_report` (what is compared, and reported), `check_runs`, `check_one_device`, `check_machines`
and `check_finished` (the runs), and `check`, which calls these.
"""
