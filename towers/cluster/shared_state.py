"""The state that the model writes and training reads, which worker 0 gives to the others.

A codebook, centers of classes, a learning rate that falls with the loss: every worker writes its
copy from its own batch. So worker 0's value goes to the others after all of the model's writes, and
before the update, whose reads wait for it. State that training only writes, such as moving averages
for evaluation, needs no message. Nor do variables that the update writes: they are the same on all
workers.

Words of other rooms used here: the `step_operations` of fetches are all operations that
`session.run(fetches)` executes; a `Writes` finds the variables that an operation writes; a tensor
is `read_from` a variable if it is the variable's value as it is.

Its test is `tests/cluster/test_machines.py`.
"""

import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster.engine import Pairs
from towers.errors import ClusterError
from towers.gradients.gradient_pairs import tensors_of, variables_of
from towers.graph.graph_walk import (
    ancestors,
    names_of,
    operation_names,
    reachable_from,
    step_operations,
    variables_by_name,
    with_names,
    without_names,
)
from towers.graph.order import Frames
from towers.graph.variable_access import Writes, is_variable, read_from, variable_op
from towers.graph.waits import operations_to_await
from towers.placement.variable_device import only_device


def writes_of(finder: Writes, names: typing.Set[str], operations: typing.Iterable[tf.Operation]
              ) -> typing.Dict[str, typing.List[tf.Operation]]:
    """The operations that write variables, by the variable's name.

    Args:
      finder: finds the variables that an operation of the graph writes.
      names: of the variables to look for.
      operations: the operations to choose from.
    """
    writes: typing.Dict[str, typing.List[tf.Operation]] = {}
    for op in operations:
        for name in names.intersection(finder.written_by(op)):
            writes.setdefault(name, []).append(op)
    return writes


class SharedState:
    """The state of one build that worker 0 gives to the others."""

    def __init__(self, own_gradients: Pairs, sums: Pairs, update: tf.Operation,
                 model_operations: typing.FrozenSet[str]):
        """Finds the variables that the model writes and training reads.

        Args:
          own_gradients: the gradients of this machine's towers.
          sums: the gradients over all machines.
          update: the operation of the update.
          model_operations: names of the operations of the model that the update waits for.
        """
        self._finder = Writes(tf.get_default_graph())
        self._model_operations = model_operations  # names
        self._step = step_operations([update])
        self._sums = tensors_of(sums)
        self._own_gradients = tensors_of(own_gradients)
        # The step is: the model, the sums of its gradients over the machines, and the update.
        names_before_update = model_operations | names_of(step_operations(self._sums))
        self._update_operations = without_names(self._step, names_before_update)
        trained = variables_of(own_gradients)
        self._trained_names = operation_names(trained)
        # A program may train variables that it has put into other collections than the global ones.
        self._variables = variables_by_name(tf.global_variables() + trained)
        operations_of_model = with_names(self._step, model_operations)
        # {name of a variable of the state: the operations by which the model writes it}
        self._writes = writes_of(self._finder, self._variables_read(), operations_of_model)

    def _variables_read(self) -> typing.Set[str]:
        """Names of the variables that training reads: the gradients are computed from them, or an
        operation of the update takes their value. Each trained variable is among them, since the
        update computes its new value from the old one."""
        names = ancestors(self._own_gradients) | self._trained_names
        for op in self._update_operations:
            for tensor in op.inputs:
                variables_with_this_value = read_from(tensor)
                names.update(names_of(variables_with_this_value))
        return names & set(self._variables)

    def variables(self, replicated: typing.Container[str]) -> typing.List[tf.Variable]:
        """The variables of the state, sorted by name.

        Args:
          replicated: names of the variables of which this worker's towers have replicas.

        Raises:
          ClusterError: the other workers cannot get the value of a variable in time.
        """
        if self._writes:
            self._check_trained(replicated)
            self._check_reads()
        return [self._variables[name] for name in sorted(self._writes)]

    def sent_before_update(self, cluster: typing.Any, update: tf.Operation,
                           awaited: typing.Sequence) -> tf.Operation:
        """The operation of the step: the update, which waits for the values of worker 0.

        Args:
          cluster: the `Cluster`.
          update: the operation of the update.
          awaited: the losses and update ops that the optimizer waits for.
        """
        last_message = self._messages_of_worker_0(cluster, awaited)
        for op in self._update_operations:
            takes_state = any(_variable_held_by(tensor) in self._writes for tensor in op.inputs)
            if takes_state:
                compat.add_control_inputs(op, [last_message])
        return tf.group(update, last_message)

    def _messages_of_worker_0(self, cluster: typing.Any,
                              awaited: typing.Sequence) -> tf.Operation:
        """Makes the messages by which the others get worker 0's values, when the model has written
        them; the arguments are those of `sent_before_update`. They come after the messages with
        gradients, one after the other, in the same order on all workers.

        Returns:
          The last message.
        """
        before_message = self._last_writes(awaited) + [tensor.op for tensor in self._sums]
        with only_device('/cpu:0'), tf.name_scope('shared_state'):
            for name in sorted(self._writes):
                with tf.control_dependencies(before_message):
                    message = cluster.engine.broadcast(cluster, [self._variables[name]])
                before_message = [message]
        return message

    def _last_writes(self, awaited: typing.Sequence) -> typing.List[tf.Operation]:
        """The operations to wait for so that the model has written the state: the losses and update
        ops, of those in `awaited`, that come after a write of the state."""
        writes = sum(self._writes.values(), [])
        names_after_writes = reachable_from(writes, self._step, control=True)
        operations: typing.List[tf.Operation] = []
        for fetch in awaited:
            op = getattr(fetch, 'op', fetch)
            if op.name in names_after_writes:
                # If the operation calls functions, the write may be in a function. A control edge
                # from the call may not wait for such a write: so this gives more operations.
                operations.extend(operations_to_await(op, self._finder))
        return operations

    def _check_trained(self, replicated: typing.Container[str]) -> None:
        """Raises `ClusterError` for a trained variable that the model writes where the other
        workers cannot get the value in time: into replicas, or within the forward pass."""
        forward_pass = names_of(step_operations(self._own_gradients))
        for name in sorted(self._trained_names.intersection(self._writes)):
            writes = self._writes[name]
            if name in replicated:
                raise ClusterError(
                    "VariablePlacement('replicated'), and the model writes the trained variable %r "
                    '(%r), on each worker for itself. Use another placement.' % (
                        name, writes[0].name))
            for op in writes:
                if op.name in forward_pass:
                    raise ClusterError(
                        'the forward pass writes the trained variable %r (%r): each worker would '
                        'compute with its own value. Put the update into the collection '
                        "UPDATE_OPS, or return it in 'updates'." % (name, op.name))

    def _check_reads(self) -> None:
        """Raises `ClusterError` for an operation of the update that may take a value of the state
        from before worker 0's value is there."""
        early_names = self._names_before_gradients()
        frames = Frames(self._update_operations)
        for op in self._update_operations:
            # The program may run an operation that was made before the gradients outside of a step,
            # where worker 0 sends no message to wait for.
            runs_in_steps_alone = op.name not in early_names
            # An operation in a loop cannot wait for the message, which is outside of the loop.
            is_outside_of_loops = frames.is_outside_of_loops(op)
            can_wait = runs_in_steps_alone and is_outside_of_loops
            for name in self._state_read_early(op, can_wait):
                raise ClusterError(
                    'variable %r is written by the model of each worker and read by %r, for the '
                    'update of the weights, at a time that cannot be told. Give the optimizer the '
                    'variable itself (use_resource=True), or read it in transform_gradients by '
                    'read_value().' % (name, op.name))

    def _names_before_gradients(self) -> typing.Set[str]:
        """Names of the operations that were made before the first gradient."""
        gradient_names = operation_names(self._own_gradients)
        operations = tf.get_default_graph().get_operations()
        early = itertools.takewhile(lambda op: op.name not in gradient_names, operations)
        return names_of(early)

    def _state_read_early(self, op: tf.Operation, can_wait: bool) -> typing.List[str]:
        """Names of the variables of the state that an operation of the update may read too early:
        it would have their values from before the message of worker 0.

        Args:
          op: the operation.
          can_wait: whether the operation can wait for that message.
        """
        names: typing.List[str] = []
        for tensor in op.inputs:
            names += self._variables_read_early(tensor, can_wait)
        return [name for name in names if name in self._writes]  # others are the same everywhere

    def _variables_read_early(self, tensor: tf.Tensor, can_wait: bool) -> typing.List[str]:
        """Names of the variables that an operation of the update may read too early by one of its
        inputs: it would have their values from before the message of worker 0.

        Args:
          tensor: the input: a value, or a variable that the operation itself reads when it runs.
          can_wait: whether the operation can wait for the message, and so read variables after it.
        """
        held = _variable_held_by(tensor)
        if held is not None:
            return [] if can_wait else [held]
        if tensor.op.name in self._model_operations:  # the model has read it, before the message
            return [variable.name for variable in read_from(tensor)]
        # An operation of the update gives the tensor, and `_check_reads` looks at that operation
        # itself; or the tensor is one of the sums, which are the same on all workers.
        return []


def _variable_held_by(tensor: tf.Tensor) -> typing.Optional[str]:
    """The name of the variable whose handle or reference a tensor is; None for any other tensor."""
    source = variable_op(tensor) if is_variable(tensor) else None
    return None if source is None else source.name
