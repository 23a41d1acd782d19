"""What the update takes of the model function's results by a closure.

A model function may leave a tensor or an operation where `transform_gradients`, or an optimizer,
finds it: in a list, or as an attribute of the model. Where the model function is called for each
tower, what is left there is the last tower's; where the towers are clones, the first one's. So that
the numbers do not depend on that, the update takes the first tower's in any case: its update of a
moving average is the one that runs. In place of a loss it takes the mean over all towers. What else
depends on a tower's examples is of a part of the batch alone, and is refused.
"""

import functools

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.graph import graph_walk
from towers.graph.variable_writes import Writes
from towers.tower.objectives import flat


class TakenResults:
    """Finds what the update takes of the towers, and gives it what one device would."""

    def __init__(self, graph, calls):
        """
        Args:
          graph: the `tf.Graph`.
          calls: `ModelCalls`.
        """
        self._graph = graph
        self._calls = calls

    def settle(self, made, fetches, known, towers, losses, whole_loss, batches):
        """Makes operations of the update take what one device would.

        Args:
          made: the operations that `transform_gradients`, or the optimizer, has made.
          fetches: tensors and operations: what they are made for.
          known: tensors and operations that they may take from a tower: the gradients.
          towers: list of all `Tower`s.
          losses: dict from names of further tensors that are a loss, to the name of the loss.
          whole_loss: function from the name of a loss (None where there is only one) to the mean of
            that loss over the batch.
          batches: of how many parts the batch consists, which the towers of all machines have.

        Raises:
          GradientError: a gradient, or what the optimizer writes to a trained variable, is computed
            from a tensor of one tower that depends on its examples.
        """
        if batches == 1:
            return
        known = {getattr(each, 'op', each).name for each in known}
        losses = dict(_losses(towers), **losses)
        is_whole = len(towers) == batches
        matters = functools.lru_cache(maxsize=None)(lambda: self._matters(made, fetches))
        updates = {getattr(update, 'op', update).name for update in towers[0].updates}
        for op in made:
            for position, tensor in enumerate(op.inputs):
                if tensor.name in losses:
                    if is_whole:
                        compat.replace_input(op, position, whole_loss(losses[tensor.name]))
                    elif (op.name, position) in matters():
                        _refuse(tensor, is_loss=True)
                    continue
                if tensor.op.name in known or self._calls.place(tensor.op) is None:
                    continue
                first = self._first(tensor.op)
                if first is not None and first is not tensor.op:
                    same = first.outputs[tensor.value_index]
                    if same.shape.is_compatible_with(tensor.shape):
                        compat.replace_input(op, position, same)
                    else:
                        first = None  # of an uneven shard, whose shape is a part of the graph
                taken = first or tensor.op
                if taken.name not in updates and self._calls.is_partial(taken) and (
                        (op.name, position) in matters()):
                    _refuse(tensor, is_loss=False)
            waits_for = [other if other.name in known else self._first(other) or other
                         for other in op.control_inputs]
            if waits_for != list(op.control_inputs):
                compat.set_control_inputs(op, waits_for)

    def _first(self, op):
        """The first call's operation for one of any call; None if there is none.

        Raises:
          GradientError: there is none, and a write of a variable takes place before the operation.
        """
        place = self._calls.place(op)
        if place is None:
            return None
        first = self._calls.twin(op, 0)
        if first is not None:
            return first
        made = {each.name for each in self._calls[place.call].operations}
        writes = Writes(self._graph)
        if any(each.name in made and writes.of(each) for each in graph_walk.step_operations([op])):
            raise GradientError(
                'transform_gradients, or the optimizer, takes operation %s, which runs an update '
                'of tower %d; the first tower, whose updates run, made other operations: make the '
                'same ones in every call of the model function.' % (op.name, place.call))
        return None

    def _matters(self, made, fetches):
        """The `(name, position)` of inputs that gradients or updated values are computed from.

        A fetched operation is the optimizer's: what it writes to trained variables counts. A tensor
        that is written to another variable and taken from there is the variable's value, as after
        `UPDATE_OPS`.
        """
        names, writes = {op.name for op in made}, Writes(self._graph)
        updates = [each for each in fetches if not isinstance(each, tf.Tensor)]
        trained = {variable.op.name for variable in tf.trainable_variables()}
        roots = [op for op in graph_walk.step_operations(updates) if op.name in names
                 and trained.intersection(writes.of(op))] if updates else []
        stack = roots + [each.op for each in fetches if isinstance(each, tf.Tensor)
                         and not writes.of(each.op)]
        seen, found = {op.name for op in stack}, set()
        while stack:
            op = stack.pop()
            if op.name not in names:
                continue
            for position, tensor in enumerate(op.inputs):
                if op.type == 'Print' and position:
                    continue  # its first input is its output; it shows the others
                found.add((op.name, position))
                if tensor.op.name not in seen and not writes.of(tensor.op):
                    seen.add(tensor.op.name)
                    stack.append(tensor.op)
        return found


def _losses(towers):
    """{name of the tensor of a tower's loss: name of the loss}."""
    found = {}
    for tower in towers:
        for name, loss in (tower.loss.items() if isinstance(tower.loss, dict)
                           else [(None, each) for each in flat(tower.loss)]):
            if isinstance(loss, tf.Tensor):
                found[loss.name] = name
    return found


def _refuse(tensor, is_loss):
    raise GradientError(
        'transform_gradients, or the optimizer, computes with %s, %s, so that the update would be '
        'by a part of the batch: let UPDATE_OPS write it to a variable, and read the variable, '
        "which then has the first tower's value. Gradients of gradients are computed so, too." % (
            tensor.name, "the loss of one worker's examples" if is_loss else
            'a tensor of the model function that depends on the examples of one tower'))


class OneCall:
    def __init__(self, recorded):
        self._recorded = recorded
        self._names = {op.name for op in recorded.operations}

    def place(self, op):
        return 0 if op.name in self._names else None

    def twin(self, op, index):
        return op

    def is_partial(self, op):
        between = [each for each in self._recorded.operations if not Writes(op.graph).of(each)]
        return op.name in graph_walk.reachable_from(
            list(self._recorded.sources) + [each for each in between if graph_walk.is_random(each)], between)
