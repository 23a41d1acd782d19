"""What is refused of a finished model, before any operation is made.

Its tests are `tests/api/test_finished_models.py` and `tests/capture/test_finished_model.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.capture.model_graph import ModelGraph
from towers.errors import InputError, ModelFunctionError
from towers.graph.graph_walk import fetches_in, names_of, tensors_taken
from towers.graph.op_types import DRAWS_DATA, FEEDS_DATA, PLACEHOLDERS
from towers.model.objectives import with_parts
from towers.model.outputs import ModelOutput
from towers.optimizers import OPTIMIZER_UPDATES
from towers.shards.batch_inputs import Inputs


def check_operations(operations: typing.Iterable[tf.Operation]) -> None:
    """Refuses a model that needs operations which only one tower may run; `operations` are all that
    it needs."""
    for op in operations:
        if op.type.startswith(DRAWS_DATA):
            raise InputError(
                'the model computes with %s (%s), of which a step takes the next elements, and '
                'each tower would take others: pass its results as inputs, all that the model '
                'needs.' % (op.outputs[0].name, op.type))
        if op.type.startswith(FEEDS_DATA):
            raise ModelFunctionError(
                'the model waits for %s (%s), which puts elements into a queue: each tower '
                'would do so. Leave that to the queue runners.' % (op.name, op.type))
        if OPTIMIZER_UPDATES.search(op.type):
            raise ModelFunctionError(
                'the model waits for %s, which updates a variable: pass the loss as it is '
                'before an optimizer minimizes it.' % op.name)


def check_shared(shared: typing.Iterable[tf.Operation]) -> None:
    """Refuses a model that needs a placeholder which may hold a batch, and is no input; `shared`
    are the operations that all towers share."""
    for op in shared:
        if op.type not in PLACEHOLDERS:
            continue
        shape = op.outputs[0].shape
        if not shape.ndims:
            continue  # a scalar; or of unknown rank, and then a step asserts that it is a scalar
        may_hold_batch = shape.as_list()[0] is None
        if may_hold_batch:
            raise InputError(
                'the model computes with the placeholder %s of shape %s, which may hold a '
                'batch, and each tower would compute with all of it: pass it as one of the '
                'inputs; or, if it is the same for all examples, give it a static first '
                'dimension, such as [4].' % (op.outputs[0].name, shape))


def check_inputs(checked: Inputs, tensors_of_leaves: typing.Sequence[typing.List[tf.Tensor]],
                 operations: typing.Iterable[tf.Operation], output: ModelOutput) -> None:
    """Refuses inputs that the model does not need, and an input that is given twice.

    Args:
      checked: the inputs, as leaves with their paths.
      tensors_of_leaves: for each leaf the tensors of the model that it stands for: three of a
        sparse tensor, none of None.
      operations: the operations of the model that are imported.
      output: the outputs of the model.
    """
    read = names_of(fetches_in(output)) | names_of(tensors_taken(operations))
    path_of: typing.Dict[str, str] = {}  # {name of a tensor: its path in the inputs}
    for (path, _), tensors in zip(checked.leaves, tensors_of_leaves):
        if not tensors:
            continue  # None in the place of an input
        name = tensors[0].name  # the first of a sparse tensor's three tells it from others
        earlier_path = path_of.setdefault(name, path)
        if earlier_path != path:
            raise InputError('%s and %s are the same tensor, %s: pass it once.' % (
                earlier_path, path, name))
        if read.isdisjoint(names_of(tensors)):
            raise InputError(
                '%s (%s) does not reach the loss, or another output of the model: if the model '
                'reads a tensor that this one is computed from, or that is computed from this '
                'one, pass that tensor; if a metric alone needs it, pass ModelOutput(loss, '
                'metrics={…}); and leave it out, if the model does not need it.' % (path, name))


def check_losses(model: ModelGraph, operations: typing.Iterable[tf.Operation],
                 output: ModelOutput) -> None:
    """Refuses a loss that does not depend on the inputs.

    Args:
      model: the graph around the model.
      operations: the operations of the model that are imported.
      output: the outputs of the model.
    """
    from_inputs = model.reachable_from_inputs(operations)
    for name, loss in with_parts('loss', output.loss):
        if loss is not None and loss.op.name not in from_inputs:
            raise ModelFunctionError(
                'the %s, %s, does not depend on the inputs: every tower would compute the '
                'same.' % (name, loss.name))
