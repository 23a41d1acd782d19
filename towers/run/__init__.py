"""The run around the towers: sessions, hooks, evaluation, learning rates.

In comes a finished build, with a directory for its checkpoints; out go sessions that can be killed
and started again, results of evaluations, and summaries. Nothing here changes the towers or their
update. Read `training_session`, with `checkpoint_hook` and `stopping` (what keeps a run safe); then
`evaluation` and `evaluation_hook`. `summaries`, `learning_rate` and `weights` stand by themselves.
"""
