"""One tower, the model on one device, as a value; and the options that all towers share."""

import collections

from towers.placement.tower_device import stages_of
from towers.tower.objectives import all_pairs


TowerOptions = collections.namedtuple('TowerOptions', [
    'model_fn', 'objectives', 'adds_registered', 'variable_scope', 'reuse', 'earlier',
    'update_ops', 'random_step', 'check_numerics', 'xla', 'recompute',
    'cutting', 'micro_batches', 'called', 'served_rank', 'has_copies'])
"""The options of all towers of a build: arguments of `build_towers`, and:

Fields:
  objectives: `Objectives`.
  adds_registered: whether registered losses are added to the model's own.
  earlier: `BuiltTowers`: the build whose variables are shared; or None.
  recompute: `'auto'`, or list of names of kept results, see `recompute.rewrite`; or None.
  cutting: `Cutting`; None where the model is not cut into stages.
  micro_batches: how many each tower has, one after the other or in a pipeline.
  called: `NamesOnOneMachine`, for seeds of random ops.
  served_rank, has_copies: see `InlineUpdates`.
  random_step: the global step, for seeds of random ops; None where these are left as they are.
"""


class Tower(collections.namedtuple('Tower', [
        'index', 'device', 'name_scope', 'inputs', 'size', 'loss', 'predictions', 'metrics',
        'gradients', 'updates', 'variables', 'data_loss', 'micro_batch', 'forward', 'backward'])):
    """The model on one device.

    Attributes:
      index: the tower's number, from 0.
      device: the device of its operations and of its gradient operations.
      name_scope: the scope of its operations, such as `'tower_1/'`; of tower 0 it is the scope
        that `build_towers` was called in, `''` mostly.
      inputs: its shard: a nest of `placeholder_with_default`s, which can be fed by hand.
      size: examples in the shard: an int, or an int32 scalar.
      loss: scalar, as the model function returned it: the mean over the shard. In a build with
        several losses it is a dict of scalars by name; `data_loss` and `gradients` are dicts, too.
      predictions: as the model function returned them; [shard, …].
      metrics: as the model function returned them.
      gradients: list of `(gradient, variable)`: this tower's share of the combined gradient, which
        is the plain sum of all towers' shares (and of the regularization's gradient). The tower's
        weight is in its share already.
      updates: operations of this tower for batch-norm statistics and the like.
      variables: the model's variables that its operations read, directly or as a replica.
      data_loss: scalar, the loss that is differentiated: without the regularization that is
        computed once for all towers.
      micro_batch: the number of this micro-batch in its tower, from 0; 0 where there is only one.
      forward: frozenset of the names of the operations of its forward pass.
      backward: frozenset of the names of the operations of its backward pass.
    """
    __slots__ = ()

    @property
    def pairs(self):
        """The `(gradient, variable)` pairs of all losses, one after the other."""
        return all_pairs(self.gradients)

    def has(self, name):
        """Whether the operation of this name belongs to the tower."""
        return name in self.forward or name in self.backward

    def __repr__(self):
        return '<Tower %d%s on %s>' % (
            self.index, ', micro-batch %d' % self.micro_batch if self.micro_batch else '',
            '+'.join(stages_of(self.device)))
