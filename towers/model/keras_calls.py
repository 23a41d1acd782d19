"""Updates, losses and variables of the Keras layers that a block of code calls.

`tf.layers` and tf_slim put their batch-norm updates and regularization losses into collections of
the graph. Keras layers do not: Keras 2 keeps the updates and losses of all calls of a layer in
lists on the layer, and Keras 3 makes assign ops that nothing runs.
"""

import contextlib
import functools
import threading
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.graph.graph_walk import (
    Recording,
    inputs_of,
    operation_names,
    operation_of,
    reachable_from,
    reached,
    without_names,
)
from towers.graph.op_types import SETS
from towers.graph.variable_access import initializers
from towers.placement.variable_device import only_device


class _Call(typing.NamedTuple):
    """An outermost call of a layer: a call that no other layer makes."""
    layer: typing.Any
    tensors: typing.List[tf.Tensor]  # the inputs of the call
    made: Recording  # the operations of the call


class _Update(typing.NamedTuple):
    """An operation that a layer was given by `add_update`, or that a function given there made."""
    layer: typing.Any
    op: tf.Operation
    is_frozen: bool  # whether the layer was frozen when the operation was recorded


_WRITES = ('Assign', 'ResourceScatter', 'Scatter')
"""The beginnings of the types of operations that write a variable, their first input."""


@contextlib.contextmanager
def record_keras_calls() -> typing.Iterator['KerasCalls']:
    """The context in which calls of Keras layers, in this graph and thread, are recorded.

    In it, `__call__`, `add_loss` and `add_update` of the base classes of tf.keras, tf_keras and
    Keras 3 are wrapped.

    Yields:
      `KerasCalls`, which answers after the context has ended.

    Raises:
      ModelFunctionError: a Keras is imported in it, whose layers could not be wrapped.
    """
    # `tf.keras` is imported only when a program names it, and the base classes of a Keras in use
    # perhaps later still. All are imported here, so that layers which the block makes are wrapped.
    compat.import_keras()
    record = KerasCalls(tf.get_default_graph())
    bases = compat.keras_base_layers()
    with contextlib.ExitStack() as undo:
        for base in bases:
            _wrap(base, record, undo)
        yield record
    for base in compat.keras_base_layers():
        if base not in bases:
            raise ModelFunctionError('the model function imports %s, whose layers it calls unseen: '
                                     'import it before the build.' % base.__module__.split('.')[0])


class KerasCalls:
    """The calls of Keras layers in one block, as `record_keras_calls` yields them."""

    def __init__(self, graph: tf.Graph):
        """Records calls in `graph`, in the present thread."""
        self._graph = graph
        self._thread = threading.get_ident()
        self._depth = 0  # how many calls of layers are open, one in another
        # The value of `_waiting_for_keras_input`; None before it was asked for.
        self._waiting: typing.Optional[typing.Set[str]] = None
        self._calls: typing.List[_Call] = []  # outermost calls, in order
        self._updates: typing.List[_Update] = []
        # (layer, tensor) for each loss that was given to `add_loss`
        self._activity: typing.List[typing.Tuple[typing.Any, tf.Tensor]] = []

    @property
    def layers(self) -> list:
        """List of the layers that other code than a Keras layer has called, each once, in order.

        Layers that were only called on a `keras.Input`, to define a model, are left out.
        """
        layers = []
        for call in self._calls:
            arguments = operation_names(call.tensors)
            defines_model = not arguments.isdisjoint(self._waiting_for_keras_input())
            if not defines_model:
                layers.append(call.layer)
        return unique(layers)

    def updates(self) -> typing.List[tf.Operation]:
        """List of the operations to run once a step for the calls, each once; of Keras 3 also the
        updates of seed generators.

        Updates of frozen layers are left out. So are updates in branches, in loops, or downstream
        of a `keras.Input`: no step can run these.
        """
        waiting = self._waiting_for_keras_input()
        operations = []
        for update in self._updates:
            if not update.is_frozen and update.op.name not in waiting:
                operations.append(update.op)
        return unique(operations + self._keras_3_updates())

    def updates_of_layers(self) -> typing.List[tuple]:
        """List of `(layer, operation)`: the updates of Keras 2 layers, also of frozen layers.

        Updates downstream of a `keras.Input` count, too, since the block may be within a call of a
        layer on such an input.
        """
        return [(update.layer, update.op) for update in self._updates]

    def weight_losses(self) -> typing.List[tf.Tensor]:
        """List of the regularization losses of the weights of `layers`, scalars, each once."""
        functions: dict = {}  # functions with equal keys make the same loss
        for layer in self.layers:
            functions.update(compat.keras_weight_losses(layer))
        losses = []
        for make_loss in functions.values():
            loss = make_loss()
            if loss is not None:
                losses.append(tf.convert_to_tensor(loss))
        return losses

    def activity_losses(self, on_keras_input: bool = False) -> typing.List[tf.Tensor]:
        """List of the losses that depend on the inputs of the layers' calls, scalars: from activity
        regularizers and `add_loss`.

        Args:
          on_keras_input: whether losses downstream of a `keras.Input` count. They do where the
            block is itself a part of a functional model, as for `KerasTowers`. Losses within
            branches and loops never count.

        Raises:
          ModelFunctionError: a loss that is no scalar.
        """
        left_out = set() if on_keras_input else self._waiting_for_keras_input()
        losses = []
        for layer, loss in self._activity:
            if loss.op.name in left_out or not self._can_run(loss.op):
                continue
            if loss.shape.ndims not in (0, None):
                raise ModelFunctionError(
                    'The Keras layer %r was given a loss of shape %s by add_loss; a scalar was '
                    'expected. Give it the mean or the sum.' % (layer.name, loss.shape))
            losses.append(loss)
        return unique(losses)

    def states(self) -> list:
        """List of the variables in which stateful RNNs among `layers` keep their state, each
        once."""
        return unique(sum(map(compat.keras_states, self.layers), []))

    def listens_to(self, layer: typing.Any) -> bool:
        """Whether a method call on a layer is to be recorded: in the recording thread, and not on a
        layer of `tf.layers`."""
        return threading.get_ident() == self._thread and not compat.is_legacy_layer(layer)

    @contextlib.contextmanager
    def calling(self, layer: typing.Any, arguments: typing.Any) -> typing.Iterator[None]:
        """The context of a call of a layer, by which the call is recorded; a call within the call
        of another layer is a part of the outer call.

        Args:
          layer: the layer.
          arguments: a nest of the arguments of the call.
        """
        recording: typing.ContextManager = contextlib.nullcontext()
        is_outermost = self._depth == 0
        if is_outermost:
            recording = self._begin_call(layer, tf.nest.flatten(arguments, expand_composites=True))
        self._depth += 1
        try:
            with recording:
                yield
        finally:
            self._depth -= 1

    def _begin_call(self, layer: typing.Any, leaves: list) -> typing.ContextManager:
        """The context of an outermost call, by which its operations are recorded.

        Args:
          layer: the layer that is called.
          leaves: the arguments of the call, as a flat list.
        """
        if not compat.is_keras_3(layer):
            # On TF 1.15 a cell keeps the mask of its first call, which has that call's batch size.
            compat.forget_dropout_masks(layer)
        # Keras 3 defines a model by a call on symbols. The operations that this makes, in a graph
        # of its own, are not the step's.
        defines_model = any(map(compat.is_keras_3_symbol, leaves))
        if defines_model:
            return contextlib.nullcontext()
        tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
        call = _Call(layer, tensors, Recording(self._graph))
        self._calls.append(call)
        return call.made

    def note_losses(self, layer: typing.Any, losses: typing.Any) -> None:
        """Records losses that were given to `layer.add_loss`. Functions among them are left out:
        they make losses of weights, and Keras keeps them."""
        for loss in tf.nest.flatten(losses):
            if tf.is_tensor(loss):
                self._activity.append((layer, loss))

    def note_update(self, layer: typing.Any, update: typing.Any) -> None:
        """Records an update, an operation, tensor or variable, that was given to
        `layer.add_update`, or that a function given there has made."""
        op = operation_of(update)
        # A function that makes an update may return None: Keras 2 does not look at its result.
        if not isinstance(op, tf.Operation) or not self._can_run(op):
            return
        # As Keras 2 has it: the updates of a stateful layer count also if its weights are frozen.
        is_stateful = getattr(layer, 'stateful', False)
        is_frozen = not layer.trainable and not is_stateful
        self._updates.append(_Update(layer, op, is_frozen))

    def _can_run(self, op: tf.Operation) -> bool:
        """Whether a step can run an operation: it is not in a branch, a loop or a function."""
        return op.graph is self._graph and self._graph.is_fetchable(op)

    def _waiting_for_keras_input(self) -> typing.Set[str]:
        """Set of the names of the operations downstream of a Keras 2 `keras.Input`: they define a
        functional model, and cannot run, since nobody feeds its placeholder."""
        if self._waiting is None:  # first asked for after the block, whose operations are all made
            self._waiting = self._find_waiting()
        return self._waiting

    def _find_waiting(self) -> typing.Set[str]:
        """Finds the value of `_waiting_for_keras_input` in the graph as it is now."""
        # Keras 3 makes no placeholder for a `keras.Input`.
        if all(compat.is_keras_3(call.layer) for call in self._calls):
            return set()
        operations = self._graph.get_operations()
        inputs = list(filter(compat.is_keras_input, operations))
        if not inputs:
            return set()
        # By control edges, too: what waits for an operation that cannot run cannot run itself.
        return reachable_from(inputs, operations, control=True)

    def _keras_3_updates(self) -> typing.List[tf.Operation]:
        """List of the operations, made in the calls of Keras 3 layers, that write a variable.

        Keras 3 registers them nowhere. Operations that give a variable its first value are left
        out: as updates they would reset the variable in each step.
        """
        updates: typing.List[tf.Operation] = []
        for call in self._calls:
            if compat.is_keras_3(call.layer):
                operations = call.made.operations
                updates += filter(self._can_run, _writes_of_step(operations))
        return updates


def _writes_of_step(operations: typing.Sequence[tf.Operation]) -> typing.List[tf.Operation]:
    """List of the operations of a call that write a variable, without the operations that give a
    variable its first value."""
    writes = [op for op in operations if op.type.startswith(_WRITES)]
    if not writes:
        return []
    later_writes = without_names(writes, initializers())
    made = set(operations)
    return [op for op in later_writes if not _sets_ready_made_value(op, made)]


def _sets_ready_made_value(op: tf.Operation, made: typing.Set[tf.Operation]) -> bool:
    """Whether a write in a call sets a variable to a value that the call makes of constants.

    Such a write assigns ready-made weights to a layer when the layer is built, in its first call.
    The value of an update depends on the call's input, or on a variable.

    Args:
      op: the operation that writes.
      made: the operations of the call.
    """
    if op.type not in SETS:  # it adds to the variable
        return False

    def inputs_in_call(source: tf.Operation) -> list:
        """The operations that `source` waits for; [] if `source` is from before the call."""
        return inputs_of(source) if source in made else []

    value = op.inputs[1].op  # input 0 is the variable
    upstream = reached([value], inputs_in_call).values()
    # An operation from before the call, such as the one that gives the layer's input, ends the
    # search, and is itself in `upstream`.
    needs_nothing_from_before = made.issuperset(upstream)
    reads_variable = any(map(_takes_variable, upstream))
    return needs_nothing_from_before and not reads_variable


def _takes_variable(op: tf.Operation) -> bool:
    """Whether an operation takes the handle of a variable, to read it."""
    return any(tensor.dtype == tf.resource for tensor in op.inputs)


def unique(items: typing.Iterable) -> list:
    """List of the items in order, each object once."""
    return list({id(item): item for item in items}.values())


# ---- the wrapping -------------------------------------------------------------------------------
#
# `_call`, `_add_loss` and `_add_update` stand in the place of methods of Keras. They get the record
# of the calls, the layer, the original method, and the arguments of the call.

def _wrap(base: type, record: KerasCalls, undo: contextlib.ExitStack) -> None:
    """Wraps the methods of a Keras base class that record what is called.

    Args:
      base: the class; only methods that it defines itself are wrapped.
      record: the record of the calls.
      undo: gets the functions by which the methods are restored.
    """
    recorders = {'__call__': _call, 'add_loss': _add_loss, 'add_update': _add_update}
    for name, recorder in recorders.items():
        original = vars(base).get(name)
        if original is not None:
            setattr(base, name, _wrapped(original, recorder, record))
            undo.callback(setattr, base, name, original)


def _wrapped(original: typing.Callable, recorder: typing.Callable,
             record: KerasCalls) -> typing.Callable:
    """Makes the method that stands in the place of an original one, and records its calls.

    Args:
      original: the method of a Keras class.
      recorder: the function that calls the method and records the call: `_call`, `_add_loss` or
        `_add_update`.
      record: the record of the calls.
    """
    @functools.wraps(original)
    def method(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """Calls the recorder; for a layer that is not recorded, the original method."""
        if not record.listens_to(self):
            return original(self, *args, **kwargs)
        return recorder(record, self, functools.partial(original, self), args, kwargs)
    return method


def _call(record: KerasCalls, layer: typing.Any, original: typing.Callable, args: tuple,
          kwargs: dict) -> typing.Any:
    """Calls a layer, and records it."""
    with record.calling(layer, (args, kwargs)):
        return original(*args, **kwargs)


def _add_loss(record: KerasCalls, layer: typing.Any, original: typing.Callable, args: tuple,
              kwargs: dict) -> typing.Any:
    """Gives losses to a layer, and records them."""
    if args:
        losses = args[0]
    elif 'losses' in kwargs:  # Keras 2
        losses = kwargs['losses']
    else:  # Keras 3
        losses = kwargs.get('loss')
    record.note_losses(layer, losses)
    return original(*args, **kwargs)


def _add_update(record: KerasCalls, layer: typing.Any, original: typing.Callable, args: tuple,
                kwargs: dict) -> typing.Any:
    """Gives updates to a layer, and records them."""
    if args:
        updates = args[0]
        other_args = args[1:]
    else:
        updates = kwargs.pop('updates')
        other_args = ()
    watched = [_watched(update, layer, record) for update in tf.nest.flatten(updates)]
    return original(watched, *other_args, **kwargs)


def _watched(update: typing.Any, layer: typing.Any, record: KerasCalls) -> typing.Any:
    """Records an update of a layer, and returns what Keras is to get in its place.

    Keras gets the update itself. In the place of a function that makes the update, Keras gets a
    function that also records it, since Keras may call the function later, or never.

    Args:
      update: an operation, a tensor, a variable, or a function that makes one of these.
      layer: the layer.
      record: the record of the calls.
    """
    if not callable(update):
        record.note_update(layer, update)
        return update

    def call_and_note() -> typing.Any:
        """Makes the update, when Keras wants it, and records it."""
        with _on_device_of(layer):
            result = update()
        record.note_update(layer, result)
        return result
    return call_and_note


def _on_device_of(layer: typing.Any) -> typing.ContextManager:
    """The context of the device of a layer's variables, with control flow v2: without it, a branch
    of `tf.cond` that writes them would be on the tower's device."""
    devices = {weight.device for weight in layer.weights}
    if len(devices) == 1 and tf.control_flow_v2_enabled():
        return only_device(devices.pop())
    return contextlib.nullcontext()
