"""Refuses a model function that trains by an optimizer of its own, within the towers' step.

Such an update has the gradient of one tower's part of the batch: the first tower's alone would
train, or each tower would, by its part, as it happens. `build_towers` is to get the optimizer, and
`replicate_model_fn` is for model functions that call their optimizers themselves.
"""

import re

import tensorflow.compat.v1 as tf

from towers.errors import GradientError
from towers.graph import graph_walk
from towers.graph.variable_writes import Writes
from towers.tower.outputs import fetches_of

OPTIMIZER_UPDATES = re.compile(r'^(Resource)?(Sparse)?Apply[A-Z]')
"""Types of the operations by which TensorFlow's optimizers update a variable."""

OF_GRADIENTS = re.compile(r'(^|/)gradients(_\d+)?/')
"""The name scope of the operations that `tf.gradients` makes."""


def check_no_own_optimizer(recorded, objectives):
    """Raises `GradientError` where a step trains a variable within a tower.

    An update is an operation of TensorFlow's optimizers, or any write of a trainable variable by
    what `tf.gradients` gives.

    Args:
      recorded: `Recorded`.
      objectives: `Objectives`; without one, updates do not run.
    """
    operations = recorded.operations
    trainable = {variable.op.name for variable in tf.trainable_variables()}
    takes_gradients = any(OF_GRADIENTS.search(op.name) for op in operations)
    writes = Writes(tf.get_default_graph())
    candidates = [op for op in operations if OPTIMIZER_UPDATES.search(op.type) or takes_gradients]
    candidates = [(op, name) for op in candidates for name in trainable.intersection(writes.of(op))]
    if not candidates:
        return
    step = {op.name for op in graph_walk.step_operations(
        fetches_of(recorded.output) + (recorded.updates if objectives else []))}
    for op, name in candidates:
        if op.name in step and (OPTIMIZER_UPDATES.search(op.type) or any(
                OF_GRADIENTS.search(each) for each in graph_walk.ancestors(
                    [tensor for tensor in op.inputs if tensor.op.name != name]))):
            raise GradientError(
                'the model function trains %r by the update %r, which a step would run in a tower, '
                'by the gradient of its part of the batch alone: leave the update out and pass the '
                'optimizer to build_towers; for several losses a dict of optimizers by name.'
                % (name, op.name))
