"""Where operations and variables are, and in which precision they compute.

In come what a caller says of devices, variables, stages and numbers, and the operations of a tower.
Out go the device of each tower (`Devices`), the place of each variable (`Placement`), operations
that are on their stage, and the config of a session. Read `tower_device`, which tells what follows
a tower to its device, before `devices`, `variable_device` and `stages`. `loop_state` puts what
loops keep on its stage, and `shared_reads` makes the reads of a weight one; `session_config` and
`numerics` need the names of the devices alone.
"""
