"""One tower: the model function's call on one device, its loss taken apart, its gradients."""

import collections
import contextlib

import tensorflow.compat.v1 as tf

from towers import compat, graph_walk
from towers.errors import GradientError, InvalidArgumentError, ModelFunctionError
from towers.keras_calls import record_keras_calls
from towers.nonfinite import checked_gradients, checked_loss
from towers.outputs import call_model_fn, to_model_output
from towers.placement import only_device
from towers.regularization import (depends_on_a_batch, losses_of_variables, registered_losses,
                                   split_loss)
from towers.stateless_random import give_own_seeds, make_stateless
from towers.tower_collections import TowerCollections
from towers.tower_device import TowerDevice
from towers.variables import SharedVariables, variables_read
from towers.xla import compiled, explained


class Tower(collections.namedtuple('Tower', [
        'index', 'device', 'name_scope', 'inputs', 'size', 'loss', 'predictions', 'metrics',
        'gradients', 'updates', 'variables', 'data_loss'])):
    """One copy of the model.

    Attributes:
      index: its number, from 0.
      device: where its operations and its gradient operations are.
      name_scope: the scope of its operations, such as `'tower_0/'`.
      inputs: its shard: a nest of `placeholder_with_default`s, to be fed by hand at will.
      size: examples in the shard: an int, or an int32 scalar.
      loss: scalar, as the model function returned it: the mean over the shard.
      predictions: as the model function returned them; [shard, …].
      metrics: as the model function returned them.
      gradients: list of `(gradient, variable)`: this tower's share of the combined gradient. The
        combined one is their plain sum (and the regularization's), so a weight that is not 1 is in
        them already.
      updates: operations of this tower for batch-norm statistics and the like.
      variables: the variables that its operations read, or that it reads copies of.
      data_loss: scalar, the loss without what depends on the weights alone.
    """
    __slots__ = ()

    def __repr__(self):
        return '<Tower %d on %s>' % (self.index, self.device)


class TowerBuilder:
    """Builds towers one after the other; the first one makes what the others share.

    Attributes:
      variables: what the towers share, known after the first tower.
      trainable: the variables to take gradients of, known after the first tower.
      regularization_loss: scalar or None, known after the first tower.
      regularization_source: what the regularization is, in words, for the plan.
      random_ops: `(replaced, kept)` random ops of a tower, see `make_stateless`; or None.
      weight_losses: losses of the weights that the first tower registered, for all.
      random_keys: the constants of a tower that hold seeds, see `make_stateless`.
      direct_variables: see `SharedVariables.direct`.
      scaled_losses: `ScaledLosses` to take gradients with, to be set before the first tower; or
        None.
    """

    def __init__(self, model_fn, optimizer, placement, graph, var_list, regularization,
                 variable_scope, reuse, earlier, check_numerics=False, random_step=None,
                 replicas=None, xla=False):
        self.variables, self.trainable = [], []
        self.regularization_loss = None
        self.regularization_source = 'none'
        self.scaled_losses = None
        self.keras_layers = 0
        self.random_ops = None
        self.random_keys = {}
        self.weight_losses = []
        self._model_fn = model_fn
        self._optimizer = optimizer
        self._placement = placement
        self._graph = graph
        self._var_list = var_list
        self._adds_registered = regularization == 'auto'
        self._check_numerics = check_numerics
        self._random_step = random_step
        self._replicas = replicas  # `Replicas` where each tower has a copy of what is trained
        self._shared = SharedVariables(placement, variable_scope, reuse, earlier, replicas)
        self._xla = xla
        self._collections = TowerCollections(graph)
        self._registered = []

    @property
    def replicates(self):
        """Whether every tower has a copy of the variables of its own."""
        return self._replicas is not None

    @property
    def direct_variables(self):
        return tuple(self._shared.direct)

    @contextlib.contextmanager
    def undone_on_error(self):
        """Leaves the graph's collections as one device would, or, on an error, as they were."""
        try:
            yield
        except BaseException:
            self._collections.undo()
            raise

    def finish_collections(self):
        """To be called when the last tower is built, before anything else joins collections."""
        self._collections.finish()

    def tower(self, index, device, scope, shards, factor):
        """Calls the model function on one device and takes the gradients of its loss there.

        Args:
          index: the tower's number.
          device: its device.
          scope: the name of its name scope.
          shards: `Shards`.
          factor: 1 for the gradient of the mean over the batch, N for the recipe's sum.

        Returns:
          `Tower`.
        """
        outer = self._graph.get_name_scope()
        outer = outer + '/' if outer else ''
        inputs = shards.inputs[index]
        self._collections.enter_tower(index, shared=self.weight_losses)
        of_others = [loss for loss in tf.losses.get_regularization_losses()
                     if depends_on_a_batch(loss)]
        with graph_walk.Recording(self._graph) as made, \
                tf.device(TowerDevice(device)), tf.name_scope(scope) as root:
            with self._shared.tower(index, root, outer), record_keras_calls() as keras, \
                    compiled(self._xla):
                returned = call_model_fn(self._model_fn, inputs)
            output = to_model_output(returned, index, self._optimizer is not None)
            keras_updates = keras.updates()
            keras_losses = keras.losses() if index == 0 else keras.activity_losses()
        sources = [leaf.op for leaf in tf.nest.flatten(inputs, expand_composites=True)
                   if leaf is not None]
        sources += [op for op in made.operations if graph_walk.is_random(op)]
        data_operations = graph_walk.reachable_from(sources, made.operations)
        of_weights, of_data = registered_losses(data_operations)
        of_weights = [loss for loss in of_weights if not any(loss is each for each in of_others)]
        for loss in keras_losses:
            (of_data if loss.op.name in data_operations else of_weights).append(loss)
        used = variables_read(made.operations)
        if index == 0 and self._replicas is not None:
            self._replicas.make(self._shared.created + used)
        added = self._collections.leave_tower(index, made.operations)
        if index == 0:
            self.weight_losses = of_weights
            self.keras_layers = len(keras.layers)
            self._note_variables(used)
        updates = _unique(added.get(tf.GraphKeys.UPDATE_OPS, []) + keras_updates
                          + list(output.updates or ()))
        if self._random_step is not None:
            self.random_ops = make_stateless(
                made.operations, _fetches(output) + updates, self._random_step, self._graph.seed,
                self.random_keys)
        if self._random_step is not None or len(shards.inputs) > 1:
            give_own_seeds(made.operations, index, self._graph.seed, self._random_step,
                           self.random_keys)
        data_loss = None
        if output.loss is not None:
            with tf.name_scope(root), only_device(TowerDevice(device)):
                data_loss = self._data_loss(index, output.loss, data_operations, of_weights,
                                            of_data)
                if self._check_numerics:
                    data_loss = checked_loss(data_loss, index)
            if index == 0:
                self._add_up_registered(output.loss.dtype)
        gradients = []
        if self._optimizer is not None:
            with tf.name_scope(root), tf.device(TowerDevice(device)), explained(self._xla):
                # Even shards: divided once, so that the sum over N towers has a scale of exactly 1.
                scale = (factor / len(shards.inputs) if shards.is_even
                         else shards.weights[index] * factor)
                gradients = self._gradients(index, data_loss, scale, used)
                # With a scaled loss, what is not finite skips the step: see `update`.
                if self._check_numerics and self.scaled_losses is None:
                    gradients = checked_gradients(gradients, data_loss, index)
        if self._replicas is not None:
            used = self._replicas.originals(used)
        return Tower(index, device, root, inputs, shards.sizes[index], output.loss,
                     output.predictions, output.metrics, gradients, updates, used, data_loss)

    def regularization_gradients(self, factor):
        """[[(gradient, variable)]] of the regularization, once; [] where there is none."""
        if self.regularization_loss is None:
            return []
        with only_device(self._placement.of_weights):
            loss = self.regularization_loss
            gradients = tf.gradients(loss if factor == 1 else loss * factor, self.trainable)
        if all(gradient is None for gradient in gradients):
            return []
        return [list(zip(gradients, self.trainable))]

    def _note_variables(self, used):
        names = {variable.op.name for variable in self._shared.created}
        self.variables = self._shared.created + [v for v in used if v.op.name not in names]
        if self._optimizer is None:
            return
        candidates = tf.trainable_variables()
        wanted = self._var_list
        self.trainable = candidates if wanted is None else self._chosen(candidates)
        if not self.trainable:
            raise GradientError(
                'there is no trainable variable%s: %s' % (
                    ' left by var_list' if wanted is not None else '',
                    'the choices were %s.' % ', '.join(v.op.name for v in candidates[:5])
                    if candidates else 'the model function made none. Pass optimizer=None to '
                    'evaluate it.'))

    def _chosen(self, candidates):
        chosen = self._var_list(candidates) if callable(self._var_list) else self._var_list
        try:
            chosen = [compat.keras_variable_value(variable) for variable in chosen]
        except TypeError:
            raise InvalidArgumentError('var_list returned %r: expected a list of variables.'
                                       % (chosen,)) from None
        for variable in chosen:
            if not isinstance(variable, compat.VARIABLE_TYPES):
                raise InvalidArgumentError('var_list holds %r of type %s: expected variables.'
                                           % (variable, type(variable).__name__))
            if variable.graph is not self._graph:
                raise InvalidArgumentError('var_list holds %r, which belongs to another graph.'
                                           % variable.op.name)
        return chosen

    def _data_loss(self, index, loss, data_operations, of_weights, of_data):
        """The tower's loss without regularization, which the first tower's call defines."""
        if loss.op.name not in data_operations:
            raise ModelFunctionError(
                'the loss of tower %d does not depend on its shard: the model function has to use '
                'the inputs that it is called with, not tensors from around it.' % index)
        data, own = split_loss(loss, data_operations)
        if index == 0:
            known = graph_walk.ancestors([loss])
            if own is not None or any(each.op.name in known for each in of_weights + of_data):
                self._adds_registered = False
                self.regularization_loss = own
                self.regularization_source = "in the model's own loss"
            elif self._adds_registered:
                self._note_registered(losses_of_variables(of_weights, self.variables), of_data)
        if data is None:
            raise ModelFunctionError(
                'the loss of tower %d consists of terms of the weights alone: it has to depend on '
                'the shard.' % index)
        if self._adds_registered and of_data:
            data = tf.add_n([data] + [tf.cast(each, data.dtype) for each in of_data])
        return data

    def _note_registered(self, of_weights, of_data):
        self._registered = of_weights
        if of_weights or of_data:
            self.regularization_source = '%d registered %s%s' % (
                len(of_weights), 'loss' if len(of_weights) == 1 else 'losses',
                ' and %d of activations' % len(of_data) if of_data else '')

    def _add_up_registered(self, dtype):
        if self._registered:
            with only_device(self._placement.of_weights), tf.name_scope('regularization'):
                self.regularization_loss = tf.add_n(
                    [tf.cast(each, dtype) for each in self._registered])

    def _gradients(self, index, data_loss, scale, used):
        if isinstance(scale, tf.Tensor):
            data_loss = data_loss * tf.cast(scale, data_loss.dtype)
        elif scale != 1.:  # not by way of tf.cast, which would round a float to float32
            data_loss = data_loss * scale
        sources = (self.trainable if self._replicas is None
                   else self._replicas.sources(self.trainable, index, used))
        if self.scaled_losses is not None:
            data_loss = self.scaled_losses.scaled(data_loss)
        pairs = self._optimizer.compute_gradients(data_loss, var_list=sources)
        if self.scaled_losses is not None:
            pairs = self.scaled_losses.unscaled(pairs)
        return pairs if self._replicas is None else self._replicas.own_pairs(pairs)


def _fetches(output):
    """Everything that a model function returned to be computed, as a flat list."""
    return [tensor for tensor in tf.nest.flatten(
        [output.loss, output.predictions, output.metrics], expand_composites=True)
            if tensor is not None]


def _unique(entries):
    seen = set()
    return [entry for entry in entries if not (id(entry) in seen or seen.add(id(entry)))]
