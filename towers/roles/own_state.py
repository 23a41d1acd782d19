"""State of each tower: local variables that the forward pass writes, and the state of Keras layers.

The first tower's state is the variable that the model makes. Tower k > 0 has `<name>_tower_<k>` in
its place, a local variable that starts with the same value. With accumulation each micro-batch
counts as a tower here.

Its test is `tests/roles/test_ownership.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.capture.record import Recorded
from towers.errors import SharedVariableError
from towers.graph.graph_walk import operation_names, variables_by_name
from towers.model.build_context import without
from towers.roles.writes import Write, writes_by
from towers.variables.slots import local_variable

StateWrites = typing.Dict[str, typing.List[tf.Operation]]
"""{name of a variable that is a tower's state: the operations that write it}."""


def find_own_state(recorded: Recorded, writes: typing.Iterable[Write],
                   step: typing.Set[str], for_metrics: typing.Set[str]) -> StateWrites:
    """Finds the variables that are each tower's own state: the variables of `_candidates` that a
    step writes.

    Args:
      recorded: the forward pass.
      writes: the writes of the forward pass.
      step: names of the operations that a step runs.
      for_metrics: names of the operations that the update_ops of metrics run.
    """
    candidates = _candidates(recorded)
    # A write of values of the shard that no step runs is also found, so that `make_own_state` can
    # refuse it: the program would run it beside the step, in tower 0 alone. What the update_op of a
    # metric writes is a counter, which all towers share, and no state of a tower.
    run_by_program = recorded.from_shard - for_metrics
    state_writes: StateWrites = collections.OrderedDict()
    for write in writes_by(writes, step | run_by_program):
        for variable in write.variables:
            if variable in candidates:
                state_writes.setdefault(variable, []).append(write.op)
    return state_writes


def make_own_state(recorded: Recorded, state_writes: StateWrites, step: typing.Set[str],
                   num_parts: int) -> typing.Dict[str, typing.List[tf.Variable]]:
    """Makes the variables in which the towers after the first keep their own state.

    Args:
      recorded: the forward pass.
      state_writes: the variables that are state, from `find_own_state`.
      step: names of the operations that a step runs.
      num_parts: how many towers there are; with accumulation, micro-batches of all towers. (With
        `copies='reuse'` it is 1: all towers share the state.)

    Returns:
      {name of the first tower's variable: the variables of all towers}.

    Raises:
      SharedVariableError: state that a step does not write, or that is trained.
    """
    if num_parts > 1:  # one tower does what the program does
        _check_state(state_writes, step, num_parts)
    candidates = _candidates(recorded)
    local = variables_by_name(tf.local_variables())
    own_state = collections.OrderedDict()
    for name in state_writes:
        first = candidates[name]
        own_state[name] = [first]
        for index in range(1, num_parts):
            own_state[name].append(_earlier_or_new(first, index, local))
    return own_state


def _candidates(recorded: Recorded) -> typing.Dict[str, tf.Variable]:
    """{name: variable} of the variables that may be state: local variables, and the state of Keras
    layers. Local variables that are also global, or are counters of metrics, are left out: all
    towers share them."""
    shared = tf.global_variables() + tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)
    candidates = variables_by_name(without(tf.local_variables(), shared))
    # Keras makes the state of a stateful RNN as global variables: only the layer tells that they
    # are state.
    candidates.update(variables_by_name(recorded.keras_states))
    return candidates


def _check_state(state_writes: StateWrites, step: typing.Set[str], num_towers: int) -> None:
    """Refuses state that a step does not write, and state that is trained.

    Args:
      state_writes: the variables that are state, with the operations that write them.
      step: names of the operations that a step runs.
      num_towers: how many towers there are.
    """
    trainable = operation_names(tf.trainable_variables())
    for name, operations in state_writes.items():
        _check_written_by_step(operations, step, num_towers)
        if name in trainable:
            raise SharedVariableError(
                'variable %s is state that each tower has of its own, since the forward pass '
                'writes it, and it is trained, which all towers do together: make it with '
                'trainable=False.' % name)


def _check_written_by_step(operations: typing.Iterable[tf.Operation], step: typing.Set[str],
                           num_towers: int) -> None:
    """Refuses operations that write state and are not among those that a `step` runs."""
    for op in operations:
        if op.name not in step:
            raise SharedVariableError(
                'operation %s, which the step does not run, writes state of a tower, and there '
                'are %d towers: return it in updates, or put it into UPDATE_OPS.' % (
                    op.name, num_towers))


def _earlier_or_new(first: tf.Variable, index: int,
                    local: typing.Dict[str, tf.Variable]) -> tf.Variable:
    """The variable that holds another tower's state.

    A build for training and one for evaluation, in the same graph, go on with the same state.

    Args:
      first: the first tower's variable.
      index: the index of the other tower.
      local: {name: local variable} of the graph, in which an earlier build may have made it.

    Returns:
      The earlier build's variable, or a new one.
    """
    name = '%s_tower_%d' % (first.op.name, index)
    earlier = local.get(name)
    if earlier is not None and earlier.shape == first.shape and earlier.dtype == first.dtype:
        return earlier
    # The new variable has the shape of its `initial_value`; its initializer assigns the `value`.
    return local_variable(first, name, initial_value=first.initial_value,
                          value=first.initial_value, device=first.device or None, trainable=False)
