"""A model function that trains by an optimizer of its own, within the towers' step: refused.

Its update would have the gradient of one tower's part of the batch. `replicate_model_fn` is for
such model functions.

Its test is `tests/roles/test_inner_training.py`.
"""

import re
import typing

import tensorflow.compat.v1 as tf

from towers.errors import GradientError
from towers.graph.graph_walk import ancestors, operation_names
from towers.optimizers import OPTIMIZER_UPDATES
from towers.roles.writes import Write

GRADIENTS_SCOPE = re.compile(r'(^|/)gradients(_\d+)?/')
"""Matches the name scope of the operations that `tf.gradients` makes."""


def check_trains_nothing(writes: typing.Iterable[Write]) -> None:
    """Refuses writes by which the model function trains a variable itself, as the `train_op` of an
    optimizer within it does."""
    trainable = operation_names(tf.trainable_variables())
    for op, names in writes:
        for name in trainable.intersection(names):
            if _is_training_step(op, name):
                raise GradientError(
                    'the model function trains %r by the update %r, which a step would run in a '
                    'tower, by the gradient of its part of the batch alone: leave the update out '
                    'and pass the optimizer to build_towers; for several losses a dict of '
                    'optimizers by name.' % (name, op.name))


def _is_training_step(op: tf.Operation, variable: str) -> bool:
    """Whether an operation trains the variable of this name, which it writes: it is an optimizer's
    (`ApplyAdam`), or it writes a value that is computed from gradients."""
    if OPTIMIZER_UPDATES.search(op.type):
        return True
    values = [tensor for tensor in op.inputs if tensor.op.name != variable]
    return any(map(GRADIENTS_SCOPE.search, ancestors(values)))
