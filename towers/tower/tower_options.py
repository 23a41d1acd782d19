"""The options that all towers of a build have in common."""

import collections

TowerOptions = collections.namedtuple('TowerOptions', [
    'model_fn', 'objectives', 'adds_registered', 'variable_scope', 'reuse', 'earlier',
    'update_ops', 'gradient_options', 'random_step', 'check_numerics', 'xla', 'recompute',
    'cutting', 'micro_batches', 'called', 'served_rank', 'has_copies'])
"""The options of all towers of a build: arguments of `build_towers`, and:

Fields:
  objectives: `Objectives`.
  adds_registered: whether registered losses are added to the model's own.
  earlier: variables of the earlier build that are to be shared, see `SharedVariables`.
  gradient_options: dict, for `compute_gradients`.
  recompute: `'auto'`, or list of names of kept results, see `recompute.rewrite`; or None.
  cutting: `Cutting`; None where the model is not cut into stages.
  micro_batches: how many each tower has, one after the other or in a pipeline.
  called: `NamesOnOneMachine`, for seeds of random ops.
  served_rank, has_copies: see `InlineUpdates`.
  random_step: the global step, for seeds of random ops; None where these are left as they are.
"""
