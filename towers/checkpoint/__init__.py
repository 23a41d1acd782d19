"""Checkpoints on disk: whole or damaged, of this model or another.

In come directories, prefixes and a graph's variables; out come the checkpoint to go on from, what
is wrong with others, and which values fit. No checkpoint is ever changed; `tidy` alone renames and
removes. Read `files` (what is in a checkpoint and its directory), `newest` (which checkpoint is the
newest, whether it is whole), `match` (whether it fits the variables), then `tidy` (a directory in
order before a run writes into it).
"""
