"""Updates, losses and variables of the Keras layers that a block of code calls.

`tf.layers` and tf_slim put their batch-norm updates and regularization losses into collections of
the graph. Keras layers do not: Keras 2 keeps the updates and losses of all calls of a layer in
lists on the layer, and Keras 3 makes assign ops that nothing runs.
"""

import collections
import contextlib
import functools
import threading
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.graph.graph_walk import Recording, inputs_of, reachable_from, reached
from towers.graph.op_types import SETS
from towers.graph.variable_access import initializers
from towers.placement.variable_device import only_device

_Call = collections.namedtuple('_Call', 'layer tensors made')
"""An outermost call of a layer, on these tensors; and the `Recording` of its operations."""

_WRITES = ('Assign', 'ResourceScatter', 'Scatter')  # a variable, given as the first input


@contextlib.contextmanager
def record_keras_calls():
    """The context in which calls of Keras layers, in this graph and thread, are recorded.

    It gives `KerasCalls`, to be asked after it. The base classes' `__call__`, `add_loss` and
    `add_update` of tf.keras, tf_keras and Keras 3 are wrapped. Raises `ModelFunctionError` where a
    Keras is imported in it.
    """
    compat.import_keras()
    record, bases = KerasCalls(tf.get_default_graph()), compat.keras_base_layers()
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
        self._graph, self._thread = graph, threading.get_ident()
        self._depth, self._waiting = 0, None
        self._calls = []     # outermost calls, in order
        self._updates = []   # (layer, op, whether it was frozen), as given to add_update
        self._activity = []  # (layer, tensor), as layers gave them to add_loss

    @property
    def layers(self) -> list:
        """The layers that other code than a Keras layer has called, each once, in order; not those
        that were only called on a `keras.Input`, to define a model."""
        waiting = self._waiting_for_keras_input()
        return unique(call.layer for call in self._calls
                      if not any(tensor.op.name in waiting for tensor in call.tensors))

    def updates(self) -> typing.List[tf.Operation]:
        """Ops to run once a step for the calls: a list, each once; in Keras 3 updates of
        seed generators, too. Not updates of frozen layers, nor in branches, in loops, or behind a
        `keras.Input`, where they cannot run."""
        waiting = self._waiting_for_keras_input()
        return unique([op for _, op, frozen in self._updates
                       if op.name not in waiting and not frozen]
                      + self._keras_3_updates())

    def updates_of_layers(self) -> typing.List[tuple]:
        """`[(layer, op)]`: the updates of Keras 2 layers, also of frozen layers, and behind a
        `keras.Input`: the block may be within a call of a layer on such an input."""
        return [(layer, op) for layer, op, _ in self._updates]

    def weight_losses(self) -> typing.List[tf.Tensor]:
        """The regularization losses of the weights of `layers`, each once: a list of scalars."""
        losses = dict(pair for layer in self.layers for pair in compat.keras_weight_losses(layer))
        made = [make() for make in losses.values()]
        return [tf.convert_to_tensor(loss) for loss in made if loss is not None]

    def activity_losses(self, on_keras_input: bool = False) -> typing.List[tf.Tensor]:
        """The losses that depend on the inputs of the layers' calls: a list of scalars, from
        activity regularizers and `add_loss`; not within branches and loops; losses behind a
        `keras.Input` only if they are wanted."""
        waiting = () if on_keras_input else self._waiting_for_keras_input()
        losses = [(layer, loss) for layer, loss in self._activity
                  if loss.op.name not in waiting and self._can_run(loss.op)]
        for layer, loss in losses:
            if loss.shape.ndims not in (0, None):
                raise ModelFunctionError(
                    'The Keras layer %r was given a loss of shape %s by add_loss; a scalar was '
                    'expected. Give it the mean or the sum.' % (layer.name, loss.shape))
        return unique(loss for _, loss in losses)

    def states(self) -> list:
        """The `tf.Variable`s in which stateful RNNs among `layers` keep their state, each once."""
        return unique(state for layer in self.layers for state in compat.keras_states(layer))

    def listens_to(self, layer: typing.Any) -> bool:
        """Whether a method call on `layer`, in the present thread, is to be recorded."""
        return threading.get_ident() == self._thread and not compat.is_legacy_layer(layer)

    @contextlib.contextmanager
    def calling(self, layer: typing.Any, arguments: typing.Any) -> typing.Iterator[None]:
        """The context of a call of `layer` on any nest of arguments."""
        made = contextlib.nullcontext()
        if not self._depth:
            leaves = tf.nest.flatten(arguments, expand_composites=True)
            # Keras 3 defines a model by calling it on symbols, and its parts on scratch tensors.
            if not any(compat.is_keras_3_symbol(leaf) for leaf in leaves):
                made = Recording(self._graph)
                self._calls.append(_Call(
                    layer, [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)], made))
            if not compat.is_keras_3(layer):
                compat.forget_dropout_masks(layer)
        self._depth += 1
        try:
            with made:
                yield
        finally:
            self._depth -= 1

    def note_losses(self, layer: typing.Any, losses: typing.Any) -> None:
        """`losses` were given to `layer.add_loss`; functions are weight losses, kept by Keras."""
        self._activity += [(layer, loss) for loss in tf.nest.flatten(losses) if tf.is_tensor(loss)]

    def note_update(self, layer: typing.Any, update: typing.Any) -> None:
        """`update` (op, tensor, variable) was given to `layer.add_update`, or made by it."""
        op = getattr(update, 'op', update)
        frozen = not layer.trainable and not getattr(layer, 'stateful', False)
        if isinstance(op, tf.Operation) and self._can_run(op):
            self._updates.append((layer, op, frozen))

    def _can_run(self, op):
        return op.graph is self._graph and self._graph.is_fetchable(op)

    def _waiting_for_keras_input(self):
        """Names of the ops that need the placeholder of a Keras 2 `keras.Input` to be fed: those by
        which a functional model is defined, which in graph mode can never run."""
        if self._waiting is None:  # later operations do not matter
            operations = [] if all(compat.is_keras_3(call.layer) for call in self._calls) else (
                self._graph.get_operations())
            inputs = [op for op in operations if compat.is_keras_input(op)]
            self._waiting = reachable_from(inputs, operations, control=True) if inputs else set()
        return self._waiting

    def _keras_3_updates(self):
        """The ops made in the calls of Keras 3 layers that write a variable, listed or not."""
        calls = [call.made.operations for call in self._calls if compat.is_keras_3(call.layer)]
        left_out, found = initializers() if calls else (), []
        for operations in calls:
            made = set(operations)
            found += [op for op in operations
                      if op.type.startswith(_WRITES) and op.name not in left_out
                      and self._can_run(op) and not _is_reset(op, made)]
        return found


def _is_reset(op, made):
    """Whether `op` sets a variable to a value that depends on nothing from before the call.

    Such an op, of a layer that is built late and assigns ready-made weights, is an initialization.
    """
    return op.type in SETS and all(
        source in made and not any(tensor.dtype == tf.resource for tensor in source.inputs)
        for source in reached([op.inputs[1].op], lambda source: inputs_of(source) if (
            source in made) else ()).values())


def unique(items):
    """The items in order, each object once."""
    return list({id(item): item for item in items}.values())


# ---- the wrapping -------------------------------------------------------------------------------

def _wrap(base, record, undo):
    """Wraps the methods that class `base` itself defines; `undo` gets functions to unwrap them."""
    for name, observed in (('__call__', _call), ('add_loss', _add_loss),
                           ('add_update', _add_update)):
        original = vars(base).get(name)
        if original is not None:
            setattr(base, name, _wrapped(original, observed, record))
            undo.callback(setattr, base, name, original)


def _wrapped(original, observed, record):
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if not record.listens_to(self):
            return original(self, *args, **kwargs)
        return observed(record, self, functools.partial(original, self), args, kwargs)
    return method


def _call(record, layer, original, args, kwargs):
    with record.calling(layer, (args, kwargs)):
        return original(*args, **kwargs)


def _add_loss(record, layer, original, args, kwargs):
    # The argument is called `losses` in Keras 2 and `loss` in Keras 3.
    record.note_losses(layer, args[0] if args else kwargs.get('losses', kwargs.get('loss')))
    return original(*args, **kwargs)


def _add_update(record, layer, original, args, kwargs):
    args = args or (kwargs.pop('updates'),)
    updates = [_watched(update, layer, record) for update in tf.nest.flatten(args[0])]
    return original(updates, *args[1:], **kwargs)


def _watched(update, layer, record):
    """Notes `update` and returns it; a function is wrapped, to note its result when Keras calls it.
    It runs on the device of the layer's variables: else a branch of TF 2's `tf.cond` is on the
    tower's."""
    if not callable(update):
        record.note_update(layer, update)
        return update

    def call_and_note():
        devices = {weight.device for weight in layer.weights}
        with only_device(devices.pop()) if len(devices) == 1 and tf.control_flow_v2_enabled() else (
                contextlib.nullcontext()):
            result = update()
        record.note_update(layer, result)
        return result
    return call_and_note
