"""The updates of a finished model: which of the program's writes a step runs.

A call of a model function registers its updates while it runs. For a finished model the graph tells
its updates: they depend on the model's inputs, or write a variable that the model reads.

Its tests are `tests/api/test_finished_models.py` and `tests/capture/test_finished_model.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.capture.model_graph import ModelGraph
from towers.graph.graph_walk import fetches_in, operation_names, operation_of
from towers.graph.op_types import ADDS, ADDS_ROWS, SETS
from towers.graph.variable_access import Writes, initializers, metric_variables
from towers.model.build_context import updates_of_no_build
from towers.model.outputs import ModelOutput

_WRITES = SETS | ADDS | ADDS_ROWS


def updates_of_model(model: ModelGraph, output: ModelOutput) -> list:
    """Lists the updates of a finished model, each once; a step runs them after all towers' reads.

    The updates that the program gave in its `ModelOutput` are the model's, except for updates that
    need a `keras.Input`, which no step can run. An update in `UPDATE_OPS`, or of a Keras layer, may
    belong to another model in the graph. It is this model's in three cases: it depends on the
    model's inputs; the model's outputs wait for it; or it writes a variable from which the outputs
    are computed, such as a counter of steps.

    Args:
      model: the graph around the model.
      output: what the program gave as the model.
    """
    updates = {}  # by the name of the operation
    for update in output.updates or ():
        if not _waits_for_keras_input(update, model):
            updates[operation_of(update).name] = update
    fetches = fetches_in(output)
    needed = model.needed(fetches)
    variables = model.variables_needed(fetches)
    of_any_model = (updates_of_no_build(model.graph)
                    + compat.keras_updates_behind(needed.values()) + _keras_3_updates(model))
    for update in of_any_model:
        name = operation_of(update).name
        is_connected = name in model.from_inputs or name in needed
        if is_connected or _writes_any(update, variables, model):
            updates[name] = update
    return list(updates.values())


def _waits_for_keras_input(update: typing.Any, model: ModelGraph) -> bool:
    """Whether an update needs a `keras.Input` that is no input of the build. Keras 2 has made such
    an update when it defined a model on that `keras.Input`; it can never run."""
    return any(map(compat.is_keras_input, model.needed([update]).values()))


def _writes_any(update: typing.Any, variables: typing.Set[str], model: ModelGraph) -> bool:
    """Whether an update writes any of the variables of these names."""
    finder = Writes(model.graph)
    for op in model.needed([update]).values():
        if finder.writes_any(op, variables):
            return True
    return False


def _keras_3_updates(model: ModelGraph) -> typing.List[tf.Operation]:
    """Lists the writes that were made in calls of Keras 3 layers and belong to a step: Keras 3 puts
    them into no collection."""
    left_out = initializers()
    updates = []
    for op in model.operations:
        if op.type not in _WRITES or op.name in left_out:
            continue
        if compat.in_control_flow(op):
            continue  # in a loop or a branch (v1): no program can fetch it as an update
        if _has_new_value_each_step(op, model) and compat.is_made_in_keras_3_call(op):
            updates.append(op)
    return updates


def _has_new_value_each_step(write: tf.Operation, model: ModelGraph) -> bool:
    """Whether a write depends on the inputs or on a variable, as the counter of a dropout does. Any
    other write sets a weight to a value that a layer was given."""
    if write.name in model.from_inputs:
        return True
    if write.type not in SETS:
        return True  # it adds to the old value of its variable
    new_value = write.inputs[1]
    return bool(model.variables_needed([new_value]))


def writes_perhaps_forgotten(model: ModelGraph, output: ModelOutput) -> typing.List[str]:
    """Lists the names of the operations that write a value of the batch, are not in the step, and
    may belong to it: the plan asks about them.

    Writes that only touch trained variables, their slots, or counters of metrics are left out: the
    update of a step, and the metrics, do these.

    Args:
      model: the graph around the model.
      output: the outputs of the model, with its updates.
    """
    # By data alone, without control edges: an operation that only waits for the batch, as a counter
    # of steps may do, writes no value of the batch.
    from_batch = model.reachable_from_inputs(model.operations, control=False)
    in_step = model.needed(fetches_in(output)).keys()
    left_out = in_step | initializers()
    trained = operation_names(tf.trainable_variables())
    counters_of_metrics = metric_variables().keys()
    finder = Writes(model.graph)
    forgotten = []
    for op in model.operations:
        writes_value_of_batch = op.type in _WRITES and op.name in from_batch
        if not writes_value_of_batch or op.name in left_out:
            continue
        variables = set(finder.written_by(op)) - trained - counters_of_metrics
        slots = {name for name in variables if _is_slot(name, trained)}
        if variables - slots:
            forgotten.append(op.name)
    return forgotten


def _is_slot(variable: str, trained: typing.Container[str]) -> bool:
    """Whether a variable is an optimizer's slot for a trained one, by its name: `w/Adam` is a slot
    for `w`. `trained` are the names of the trained variables."""
    owner = variable.rsplit('/', 1)[0]
    return owner in trained
