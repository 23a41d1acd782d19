"""Updates, losses and variables of the Keras layers that a block of code calls.

`tf.layers` and tf_slim put their batch-norm updates and regularization losses into collections of
the graph. Keras layers do not: Keras 2 keeps the updates and losses of all calls of a layer in
lists on the layer, and Keras 3 makes assign ops that nothing runs.
"""

import contextlib
import functools
import importlib.abc
import sys
import threading

import tensorflow.compat.v1 as tf

from towers import compat, errors
from towers.graph.graph_walk import reachable_from
from towers.placement.variable_device import only_device

# Ops that write a variable, reference or resource, given as their first input.
_WRITES = ('Assign', 'ResourceScatter', 'Scatter')
# Ops among `_WRITES` that replace the whole value, whatever it was.
_REPLACES = ('Assign', 'AssignVariableOp')


@contextlib.contextmanager
def record_keras_calls():
    """Records the Keras layers and models that are called in a `with` block, in this graph.

    Works for tf.keras of TF 1.15, Keras 2.15, tf_keras and Keras 3, whether a layer was made in the
    block or before, and Keras imported before the block or in it. Imports no Keras. Layers of
    `tf.layers` and tf_slim are left out: their updates and losses are in collections.

    During the block, in this thread, `__call__`, `add_loss` and `add_update` of the base classes of
    Keras layers are wrapped. Blocks can be nested; the outer one records the calls of the inner one
    too.

    Yields:
        A `KerasCalls`. Ask it after the block.
    """
    record = KerasCalls(tf.get_default_graph())
    with contextlib.ExitStack() as undo:
        for base in compat.keras_base_layers():
            _wrap(base, record, undo)
        watcher = _ImportWatcher(compat.keras_layer_modules(),
                                 lambda module: _wrap(module.Layer, record, undo))
        sys.meta_path.insert(0, watcher)
        undo.callback(sys.meta_path.remove, watcher)
        try:
            yield record
        finally:
            record.close()


class KerasCalls(object):
    """The calls of Keras layers in one block; what `record_keras_calls` yields."""

    def __init__(self, graph):
        self._graph = graph
        self._thread = threading.get_ident()
        self._open = True
        self._depth = 0
        self._calls = []     # outermost calls, in order
        self._updates = []   # (layer, op, whether it was frozen), as given to add_update
        self._activity = []  # (layer, tensor), as layers gave them to add_loss
        self._waiting = None

    @property
    def layers(self):
        """The layers that were called by other code than a Keras layer; each once, in order.

        Layers that were only called on a `keras.Input`, to define a model, are not among them.
        """
        return unique(call.layer for call in self._real_calls())

    def updates(self):
        """Ops to run once a step for the calls in this block: a list, each once.

        These are the updates of moving averages and other state (metrics, stateful RNNs), and in
        Keras 3 the steps of the seed generators, without which each step has the same dropout
        mask. Initializers are not among them, nor are updates that wait for the placeholder of a
        `keras.Input`, nor those of layers that are not trainable, nor those made within `tf.cond`
        or `tf.while_loop`, which cannot be run from outside.
        """
        waiting = self._waiting_for_keras_input()
        return unique([op for _, op, frozen in self._updates
                       if op.name not in waiting and not frozen]
                       + self._keras_3_updates())

    def updates_of_layers(self):
        """`[(layer, op)]`: the updates of Keras 2 layers, whether or not these are trainable now.

        Updates that cannot be run are among them: the block may be within a call of a layer on a
        `keras.Input`.
        """
        return [(layer, op) for layer, op, _ in self._updates]

    def weight_losses(self):
        """The regularization losses of the weights of `layers`: the same for every tower.

        Makes new ops at each call, in the caller's scopes. A loss that two of the layers share,
        because both contain its layer, is there once.

        Returns:
            A list of scalar tensors.
        """
        losses, seen = [], set()
        for layer in self.layers:
            for key, make in compat.keras_weight_losses(layer):
                if key not in seen:
                    seen.add(key)
                    losses.append(make())
        return [tf.convert_to_tensor(loss) for loss in losses if loss is not None]

    def activity_losses(self, on_keras_input=False):
        """The losses that depend on what the layers were called on, of the calls in this block.

        These are the activity regularizers, which Keras divides by the size of the batch, and
        tensors given to `add_loss`. They are part of the tower's own loss. Those made within
        `tf.cond` or `tf.while_loop`, which cannot be used outside, are not among them.

        Args:
            on_keras_input: whether the block is within a call of a layer on a `keras.Input`, so
                that losses which wait for its placeholder are wanted, too.

        Returns:
            A list of scalar tensors, in order.

        Raises:
            ModelFunctionError: one is not a scalar.
        """
        waiting = () if on_keras_input else self._waiting_for_keras_input()
        losses = []
        for layer, loss in self._activity:
            if loss.op.name in waiting or not self._can_run(loss.op):
                continue  # made to define a model, or within tf.cond
            if loss.shape.ndims not in (0, None):
                raise errors.ModelFunctionError(
                    'The Keras layer %r was given a loss of shape %s by add_loss; a scalar was '
                    'expected. Give it the mean or the sum.' % (layer.name, loss.shape))
            losses.append(loss)
        return unique(losses)

    def states(self):
        """The `tf.Variable`s in which stateful RNNs among `layers` keep their state, each once."""
        return unique(state for layer in self.layers for state in compat.keras_states(layer))

    # ---- called by the wrapped methods ----------------------------------------------------------

    def listens_to(self, layer):
        """Whether a method call on `layer`, in the present graph and thread, is to be recorded."""
        return (self._open and threading.get_ident() == self._thread
                and not compat.is_legacy_layer(layer))

    @contextlib.contextmanager
    def calling(self, layer, arguments):
        """The context of a call of `layer` on any nest of arguments."""
        call = None
        if not self._depth:
            leaves = tf.nest.flatten(arguments, expand_composites=True)
            # Keras 3 defines a model by calling it on symbols, and its parts on scratch tensors.
            if not any(compat.is_keras_3_symbol(leaf) for leaf in leaves):
                call = _Call(layer, leaves, self._graph)
                self._calls.append(call)
            if not compat.is_keras_3(layer):
                compat.forget_dropout_masks(layer)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if call is not None:
                call.close(self._graph)

    def note_losses(self, layer, losses):
        """`losses` were given to `layer.add_loss`; functions are weight losses, kept by Keras."""
        self._activity.extend((layer, loss) for loss in tf.nest.flatten(losses)
                              if tf.is_tensor(loss))

    def note_update(self, layer, update):
        """`update` (op, tensor, variable) was given to `layer.add_update`, or made by it."""
        op = getattr(update, 'op', update)
        frozen = not layer.trainable and not getattr(layer, 'stateful', False)
        if isinstance(op, tf.Operation) and self._can_run(op):
            self._updates.append((layer, op, frozen))

    def close(self):
        """Ends the recording; what is called later is not recorded."""
        self._open = False

    # ---- what the graph tells -------------------------------------------------------------------

    def _can_run(self, op):
        return op.graph is self._graph and self._graph.is_fetchable(op)

    def _real_calls(self):
        waiting = self._waiting_for_keras_input()
        return [call for call in self._calls
                if not any(tensor.op.name in waiting for tensor in call.tensors)]

    def _waiting_for_keras_input(self):
        """The names of the ops that need the placeholder of a Keras 2 `keras.Input` to be fed.

        A functional model is defined by calling its layers on these placeholders, which in graph
        mode makes ops, updates and losses that can never run.
        """
        if self._waiting is not None:
            return self._waiting
        waiting = set()
        if not all(compat.is_keras_3(call.layer) for call in self._calls):
            operations = self._graph.get_operations()
            inputs = [op for op in operations if compat.is_keras_input(op)]
            waiting = reachable_from(inputs, operations, control=True) if inputs else waiting
        if not self._open:
            self._waiting = waiting  # later operations do not matter
        return waiting

    def _keras_3_updates(self):
        """The ops made in the calls of Keras 3 layers that write a variable.

        Also where the layers do not list the variable, such as the state of a stateful RNN.
        """
        initializers = {compat.initializer_of(variable) for variable in
                        self._graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES) +
                        self._graph.get_collection(tf.GraphKeys.LOCAL_VARIABLES)}
        found = []
        for call in self._calls:
            made = set(call.ops)
            found.extend(op for op in call.ops
                         if op.type.startswith(_WRITES) and op not in initializers
                         and self._can_run(op) and not _is_reset(op, made))
        return found


class _Call(object):
    """An outermost call of a layer."""

    def __init__(self, layer, leaves, graph):
        self.layer = layer
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
        self.ops = ()
        # Only Keras 3 hides its updates among the ops of the call.
        self._start = len(graph.get_operations()) if compat.is_keras_3(layer) else None

    def close(self, graph):
        if self._start is not None:
            self.ops = tuple(graph.get_operations()[self._start:])


def _is_reset(op, made):
    """Whether `op` sets a variable to a value that depends on nothing from before the call.

    Such an op, made for instance by a layer that is built late and assigns ready-made weights, is
    an initialization: run at each step, it would undo the training.
    """
    if op.type not in _REPLACES:
        return False
    pending, seen = [op.inputs[1].op], set()
    while pending:
        source = pending.pop()
        if source not in made or any(tensor.dtype.base_dtype == tf.resource
                                     for tensor in source.inputs):
            return False
        if source not in seen:
            seen.add(source)
            pending.extend(_inputs_of(source))
    return True


def _inputs_of(op):
    return [tensor.op for tensor in op.inputs] + list(op.control_inputs)


def unique(items):
    """The items in order, each object once."""
    found, seen = [], set()
    for item in items:
        if id(item) not in seen:
            seen.add(id(item))
            found.append(item)
    return found


# ---- the wrapping -------------------------------------------------------------------------------

def _wrap(base, record, undo):
    """Wraps the methods that class `base` itself defines; `undo` gets functions to unwrap them."""
    for name, wrapper in (('__call__', _wrapped_call), ('add_loss', _wrapped_add_loss),
                          ('add_update', _wrapped_add_update)):
        original = vars(base).get(name)
        if original is not None:
            setattr(base, name, functools.wraps(original)(wrapper(original, record)))
            undo.callback(setattr, base, name, original)


def _wrapped_call(original, record):
    def __call__(self, *args, **kwargs):
        if not record.listens_to(self):
            return original(self, *args, **kwargs)
        with record.calling(self, (args, kwargs)):
            return original(self, *args, **kwargs)
    return __call__


def _wrapped_add_loss(original, record):
    def add_loss(self, *args, **kwargs):
        if record.listens_to(self):
            # The argument is called `losses` in Keras 2 and `loss` in Keras 3.
            record.note_losses(self, args[0] if args else kwargs.get('losses', kwargs.get('loss')))
        return original(self, *args, **kwargs)
    return add_loss


def _wrapped_add_update(original, record):
    def add_update(self, updates, *args, **kwargs):
        if record.listens_to(self):
            updates = [_watched(update, self, record) for update in tf.nest.flatten(updates)]
        return original(self, updates, *args, **kwargs)
    return add_update


def _watched(update, layer, record):
    """Notes `update` and returns it; a function is wrapped, to note its result when Keras calls it.
    """
    if not callable(update):
        record.note_update(layer, update)
        return update

    def call_and_note():
        with _beside_weights(layer):
            result = update()
        record.note_update(layer, result)
        return result
    return call_and_note


def _beside_weights(layer):
    """The device scope for updates of a layer's variables: their device, where it is one for all.

    Without it, a branch of TF 2's `tf.cond`, which batch norm makes under a learning phase, is on
    the tower's device and also colocated with the variable by Keras: "Cannot colocate nodes".
    """
    devices = {weight.device for weight in layer.weights}
    if len(devices) != 1 or not tf.control_flow_v2_enabled():
        return contextlib.nullcontext()
    return only_device(devices.pop())


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls `then(module)` right after any of the named modules has been imported.

    TensorFlow imports Keras when `tf.keras` is first used, which may be in the model function.
    """

    def __init__(self, names, then):
        self._names = names
        self._then = then

    def find_spec(self, name, path=None, target=None):
        """The spec that the next finders give, changed to call `then` when the module is loaded."""
        if name not in self._names:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1:]:
            # Some finders, and some loaders, are older than the protocol.
            find_spec = getattr(finder, 'find_spec', None)
            spec = None if find_spec is None else find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, 'exec_module'):
                    self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader):
        exec_module = loader.exec_module

        def exec_and_tell(module):
            exec_module(module)
            self._then(module)
        loader.exec_module = exec_and_tell
