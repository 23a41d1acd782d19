"""`build_towers`: from the user's arguments to towers, their update, and the plan.

In come a model, the tensors of a batch, an optimizer, and options; out goes `BuiltTowers`. All
arguments are checked before any operation is made (`Request`); then each pass takes what the passes
before it have returned, and none changes their results. Read `options` and `built` (what goes in
and out), `build` (the list of passes), `checked_request` and `contradictions` (the arguments; their
type is in `model/request.py`), `make_towers` or `call_for_each` (the towers), `train_ops` with
`riding_updates`, then `describe` with `training_lines` and `equality_line` (the plan), and
`batch_tensors` (`BuiltTowers.of`).
"""
