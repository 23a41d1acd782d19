"""What `build_towers` returns."""

import collections


class BuiltTowers(collections.namedtuple('BuiltTowers', [
        'train_op', 'loss', 'predictions', 'metrics', 'gradients', 'variables', 'slots', 'towers',
        'regularization_loss', 'global_step', 'devices', 'placement', 'direct_variables',
        'plan', 'replicas', 'precision', 'scaled_losses', 'xla', 'variable_scope', 'train_ops',
        'staged', 'machines', 'own_state'])):
    """What `build_towers` made.

    Attributes:
      train_op: the operation that does one step; None without an optimizer. With several losses
        it is a step of all: each gradient is that of the weights before the step.
      loss: scalar, the mean over the batch's examples plus the regularization, as one device
        would compute it; from the weights before the update. With several losses a dict of such
        by name, as `gradients` is of lists.
      predictions: nest of tensors [batch, …] in batch order (scalars: [towers]), or None.
      metrics: dict as the model function's, over all towers.
      gradients: list of `(gradient, variable)`: combined and transformed, what the optimizer gets.
      variables: the variables that the model made, and those it takes gradients of.
      slots: variables that the optimizer made.
      towers: list of `Tower`.
      regularization_loss: scalar, what of the loss is computed once for all towers, or None:
        `loss` is the towers' weighted `data_loss`es and this.
      global_step: the variable that counts steps, or None.
      devices: the towers' devices.
      placement: `Placement` of the variables.
      direct_variables: those shared by order of creation, for `reuse=` of a later build.
      plan: `Plan`; print it.
      replicas: `Replicas`: the other towers' replicas of the trainable variables; None where there
        is one set.
      precision: as given; `use_precision` makes the session's config keep it.
      scaled_losses: `ScaledLosses`, whose `scale` and `skipped_steps` are scalars to be logged with
        a step; or None.
      xla: as given.
      variable_scope: full name of the scope that the model's variables are under, `''` for none.
      train_ops: with several losses, dict from their names to the operation of a step of that loss
        alone: to be run one after the other, in turn as the program likes (two in one
        `session.run` would race: `train_op` is for that). Each computes what its loss needs and
        counts as one step. An update of batch norm rides on the train op of each loss that is
        computed from its layer. Empty with one loss.
      staged: `StagedInputs`, or None without `stage_inputs`.
      machines: what combines the gradients across the machines of a cluster; None without one.
      own_state: list of the variables that each tower has one of, those of all towers, by variable
        and then by tower: `tf.variables_initializer(built.own_state)` sets all of them back, which
        the initializer of the model's own does for the first tower alone.
    """
    __slots__ = ()

    def __repr__(self):
        return '<BuiltTowers: %d towers on %s>' % (len(self.devices), ', '.join(self.devices))
