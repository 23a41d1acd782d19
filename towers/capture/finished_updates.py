"""The updates of a finished model: which writes, of all that the program has made, are a step's.

A call of a model function registers its updates while it runs. Of a finished model the graph tells
them: what depends on the model's inputs, or writes a variable that the model reads.

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

    What the program returned as updates are all of them the model's, but for updates of a
    `keras.Input`, which no step can run. `UPDATE_OPS` and the updates of Keras layers may be of
    other models in the graph. Of these, the model's are the updates that depend on its inputs, that
    its outputs wait for, or that write a variable from which its outputs are computed (a counter).

    Args:
      model: the graph around the model.
      output: what the program returned.
    """
    updates = {}  # by the name of the operation
    for update in output.updates or ():
        if not _waits_for_keras_input(update, model):
            updates[operation_of(update).name] = update
    fetches = fetches_in(tuple(output))
    needed = model.needed(fetches)
    variables = model.variables_needed(fetches)
    updates_of_keras = compat.keras_updates_behind(needed.values()) + _keras_3_updates(model)
    for update in updates_of_no_build(model.graph) + updates_of_keras:
        name = operation_of(update).name
        is_of_model = name in model.from_inputs or name in needed
        if is_of_model or _writes_any(update, variables, model):
            updates[name] = update
    return list(updates.values())


def _waits_for_keras_input(update: typing.Any, model: ModelGraph) -> bool:
    """Whether an update is one of those by which Keras 2 has defined a model, on a `keras.Input`
    that is no input of the build: it can never run."""
    return any(map(compat.is_keras_input, model.needed([update]).values()))


def _writes_any(update: typing.Any, variables: typing.Set[str], model: ModelGraph) -> bool:
    """Whether an update writes any of the variables of these names."""
    finder = Writes(model.graph)
    operations = model.needed([update]).values()
    return any(finder.writes_any(op, variables) for op in operations)


def _keras_3_updates(model: ModelGraph) -> typing.List[tf.Operation]:
    """Lists the writes that were made in calls of Keras 3 layers and belong to a step: Keras 3 puts
    them into no collection."""
    left_out = initializers()
    updates = []
    for op in model.operations:
        is_write = op.type in _WRITES and op.name not in left_out
        # What is in a loop or a branch (v1) cannot be fetched, and so is no update.
        if not is_write or compat.in_control_flow(op):
            continue
        if _has_new_value_each_step(op, model) and compat.is_made_in_keras_3_call(op):
            updates.append(op)
    return updates


def _has_new_value_each_step(write: tf.Operation, model: ModelGraph) -> bool:
    """Whether a write depends on the inputs or on a variable, as the counter of a dropout does. Any
    other write sets a weight to a value that a layer was given."""
    if write.name in model.from_inputs or write.type not in SETS:
        return True
    value = write.inputs[1]
    return bool(model.variables_needed([value]))


def writes_perhaps_forgotten(model: ModelGraph, output: ModelOutput) -> typing.List[str]:
    """Lists the names of the operations that write a value of the batch, are not in the step, and
    may belong to it: the plan asks about them.

    Writes that only touch trained variables, their slots, or counters of metrics are left out: the
    update of a step, and the metrics, do these.

    Args:
      model: the graph around the model.
      output: the outputs of the model, with its updates.
    """
    from_batch = model.reachable_from_inputs(model.operations, control=False)
    in_step = model.needed(fetches_in(tuple(output))).keys()
    left_out = in_step | initializers()
    trained = operation_names(tf.trainable_variables())
    written_elsewhere = trained | metric_variables().keys()
    finder = Writes(model.graph)
    forgotten = []
    for op in model.operations:
        is_write_of_batch = op.type in _WRITES and op.name in from_batch
        if not is_write_of_batch or op.name in left_out:
            continue
        variables = set(finder.written_by(op)) - written_elsewhere
        neither_slots_nor_trained = [name for name in variables if not _is_slot(name, trained)]
        if neither_slots_nor_trained:
            forgotten.append(op.name)
    return forgotten


def _is_slot(variable: str, trained: typing.Container[str]) -> bool:
    """Whether a variable is an optimizer's slot, by its name, as of `w/Adam` for `w`; `trained` are
    the names of the trained variables."""
    return variable.rsplit('/', 1)[0] in trained
