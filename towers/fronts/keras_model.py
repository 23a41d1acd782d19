"""`ParallelModel`: a Keras model over several devices, itself a Keras model with `fit`.

Its test is `tests/fronts/test_keras_model.py`.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_graph_mode
from towers.errors import InvalidArgumentError, MissingPackageError
from towers.fronts.keras_towers import KerasTowers, device_of_gradient, one_or_list
from towers.graph.graph_walk import Recording, operation_of
from towers.model.build_context import check_not_nested
from towers.placement.devices import check_one_stage, resolve_devices
from towers.placement.loop_state import keep_stacks_with_loops


def ParallelModel(  # pylint: disable=invalid-name
        model: typing.Any,
        devices: typing.Union[None, int, str, typing.Sequence] = None) -> typing.Any:
    """A Keras model that computes each batch on several devices, one shard of it on each.

        model = towers.ParallelModel(model, devices=2)
        model.compile('sgd', 'mse')
        model.fit(x, y, batch_size=64)

    The result is a `Model` of the same Keras as the given model: `tf.keras` of TF 1.15 and 2.15 or
    tf_keras, in graph mode, in the default graph and with Keras' session. Inputs are cut on the
    CPU, the tower of each device calls the one model, and outputs are put together in batch order
    on the CPU, under the model's output names. Losses and metrics are computed from the merged
    outputs, so they and the gradients are those of one device on the whole batch, whatever the
    sizes of the shards: n examples on N devices are cut as with `remainder='weight'` of
    `build_towers`. With fewer examples than devices, the other devices get the first example again,
    which does not count there. Gradients are computed on the devices of the towers.

    Batch norm normalises each shard by itself; its moving statistics come from the first tower. A
    loss that layers add counts once: regularizers of weights as they are, `add_loss` of tensors and
    activity regularizers as the mean over the shards, weighted by their examples. A scalar output,
    such as a loss, becomes [batch, 1]: each example has the value of its shard, so that the mean
    over the batch is the weighted mean.

    `summary`, `save`, `save_weights` and `load_weights` are those of the model inside, and
    callbacks such as `ModelCheckpoint` use them: the saved model is a model for one device. Unless
    the program has compiled the model inside, `save` compiles it with the optimizer and loss of the
    `ParallelModel`, so that the optimizer's state is in the file. `layers` and `get_layer` are the
    result's own: take them of `inner_model`.

    Virtual CPUs need a session with this config, set before the first weight is loaded or trained
    (with Keras' own session, TensorFlow puts all towers on one CPU):

        keras.backend.set_session(tf.Session(config=towers.session_config(2)))

    Args:
      model: a functional or a built `Sequential` model. It stays usable.
      devices: as for `build_towers`: None, a count, or names such as `['/gpu:0', '/gpu:2']`.

    Returns:
      The model, with further attributes: `inner_model`, the given model; `devices`, the names of
      the towers' devices; and `plan`, the `Plan` of the towers, to be printed.

    Raises:
      InvalidArgumentError: `model` is no model of such a Keras; it has no fixed inputs, stateful
        RNNs, or layers that add metrics; it is of another graph; TensorFlow executes eagerly.
      DeviceError: as `build_towers`.
      MissingPackageError: a model of Keras 3, whose `fit` does not work in graphs.
    """
    keras = _checked_keras(model)
    names = resolve_devices(devices)
    check_one_stage('ParallelModel', names)
    model_towers = KerasTowers(model, names)
    # Keras chooses the class of a functional model itself: `Functional` on 2.15, a subclass of
    # `keras.Model`.
    functional_class: typing.Any = type(keras.Model(model.inputs, model.outputs))
    return _parallel_class(functional_class)(keras, model_towers)


def _checked_keras(model: typing.Any) -> typing.Any:
    """The Keras module of a model, once it is checked that towers can call the model.

    Raises:
      InvalidArgumentError, MissingPackageError: they cannot; `ParallelModel` lists the causes.
    """
    name = getattr(model, 'name', model)
    if compat.is_keras_3(model):
        raise MissingPackageError(
            'ParallelModel: the model %r is of Keras 3, which cannot fit, evaluate or predict in '
            'graph mode. Call it in the model function of towers.build_towers, which trains it by '
            'a tf.train.Optimizer; or install tf-keras and set the environment variable '
            'TF_USE_LEGACY_KERAS=1 before tf.keras is first used.' % name)
    keras = compat.keras_of(model)
    if keras is None:
        raise InvalidArgumentError(
            'ParallelModel takes a tf.keras or tf_keras model, and was given %.80r of type %s.'
            % (model, type(model).__name__))
    check_graph_mode('ParallelModel')
    fault = _fault_of_model(model)
    if fault is None:
        fault = _fault_of_layers(model, keras)
    if fault is not None:
        raise InvalidArgumentError('ParallelModel: the model %r %s.' % (name, fault))
    return keras


def _fault_of_model(model: typing.Any) -> typing.Optional[str]:
    """Why towers cannot call a model, as a text that follows its name; None if they can."""
    or_else = 'call it in the model function of towers.build_towers'
    is_built = getattr(model, 'inputs', None) and getattr(model, 'outputs', None)
    if not is_built:
        return ('has no inputs yet: give the first layer of a Sequential an input_shape=, make a '
                'subclassed model a functional one (keras.Model(x, model(x)) with x = '
                'keras.Input(…)), or ' + or_else)
    if not compat.is_keras_graph_network(model):
        return ('is a subclassed model of type %s, with no graph of layers to call for each tower: '
                'make it a functional one (keras.Model(x, model(x)) with x = keras.Input(…)), or %s'
                % (type(model).__name__, or_else))
    for name, tensor in zip(model.input_names, model.inputs):
        if not isinstance(tensor, tf.Tensor):
            return ('has the input %r, a %s: give it a dense input, or %s, which cuts sparse ones'
                    % (name, type(tensor).__name__, or_else))
        if tensor.graph is not tf.get_default_graph():
            return ('belongs to another graph than the default one: make both under the same '
                    'tf.Graph().as_default(), after any keras.backend.clear_session()')
    return None


def _fault_of_layers(model: typing.Any, keras: typing.Any) -> typing.Optional[str]:
    """Why towers cannot call a model with these layers, as a text that follows its name; or None.

    `keras` is the Keras module of the model.
    """
    for layer in compat.keras_parts(model):
        fault = _fault_of_layer(layer, keras)
        if fault is not None:
            return fault
    return None


def _fault_of_layer(layer: typing.Any, keras: typing.Any) -> typing.Optional[str]:
    """Why towers cannot call a model with a layer, or another model, in it.

    Args:
      layer: the layer or the other model.
      keras: the Keras module of the model.

    Returns:
      A text that follows the name of the model; None if they can call it.
    """
    if isinstance(layer, _ParallelMethods):
        return 'is or holds a ParallelModel already: give its inner_model'
    if isinstance(layer, keras.Model):  # its layers are looked at by themselves
        return None
    # A layer that is no RNN may be `stateful`, such as a sum over the batches; but only an RNN has
    # `reset_states`.
    is_stateful_rnn = getattr(layer, 'stateful', False) and hasattr(layer, 'reset_states')
    if is_stateful_rnn:
        return ('has the stateful layer %r, which keeps a state for each example of a whole batch: '
                'make it with stateful=False and pass the state as initial_state= from an input '
                'and out as an output, or call it in the model function of towers.build_towers'
                % layer.name)
    if getattr(layer, 'metrics', None):
        return ('has the layer %r, which adds a metric: each tower would add it. Make what it is '
                'computed from an output, and give the metric to compile(metrics=…)' % layer.name)
    return None


# For type checkers: the base of the mix-ins below, which are combined with classes of Keras.
_Keras: typing.Any = object


class _WeightsOfInner(_Keras):
    """A mix-in: the weights, and whether they are trained, are those of the model inside."""
    weights = property(lambda self: self.model_towers.model.weights)
    trainable_weights = property(lambda self: self.model_towers.model.trainable_weights)
    non_trainable_weights = property(lambda self: self.model_towers.model.non_trainable_weights)

    @property
    def trainable(self) -> bool:
        """Whether the model inside is trained."""
        return self.model_towers.model.trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        """Sets whether the model inside is trained."""
        inner = self.model_towers.model
        # Keras gives the value to all layers of a model. The constructor of Keras sets True, which
        # would thaw the layers that the program has frozen.
        if value != inner.trainable:
            inner.trainable = value


def _listed(value: typing.Any) -> list:
    """A value that Keras gives as one tensor, or as a list or tuple of several, as a list."""
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value]


@functools.lru_cache(maxsize=None)
def _layer_class(layer: typing.Any) -> type:
    """The class of the layer that calls a model in towers; `layer` is the `Layer` of a Keras."""

    class TowersOfModel(_WeightsOfInner, layer):
        """The layer that calls the model in every tower, and merges what comes out."""

        def __init__(self, model_towers: KerasTowers, **keywords: typing.Any):
            """Makes the layer; `keywords` are arguments of Keras' `Layer`."""
            # Past `__setattr__`, with which Keras would track what the object holds.
            self.__dict__['model_towers'] = model_towers
            # Without `autocast`: Keras would cast float64 inputs, say, to the type of this layer.
            super().__init__(autocast=False, **keywords)
            self.supports_masking = True
            # Losses of weights, which do not depend on the inputs of the towers.
            for _, loss in compat.keras_weight_losses(model_towers.model):
                self.add_loss(loss)

        # AutoGraph is for the user's layers, not for what makes towers.
        @tf.autograph.experimental.do_not_convert
        def call(self, inputs, training=None, mask=None):
            """The outputs of the model for the whole batch.

            Args:
              inputs: a tensor [batch, …], or a list of such tensors.
              training: a bool, a tensor, or None, as Keras gives it.
              mask: a mask, a list with a mask for each input, or None.

            Returns:
              A tensor [batch, …], or a list of such tensors.
            """
            input_list = _listed(inputs)
            masks = _listed(mask)
            if len(masks) == 1:  # the mask of all inputs, or None
                masks *= len(input_list)
            called = self.model_towers.call(input_list, masks, training)
            self.__dict__['merged_masks'] = called.masks
            for loss in called.losses:
                self.add_loss(loss)
            if called.updates:
                self.add_update(called.updates)
            return one_or_list(called.outputs)

        def compute_mask(self, inputs, mask=None):
            """The masks of the outputs, as the last `call` has got them from the towers."""
            return one_or_list(self.__dict__['merged_masks'])

        def get_config(self):
            """Raises: the layer cannot be made from a config."""
            raise _NoConfigError()

    return TowersOfModel


class _NoConfigError(InvalidArgumentError, NotImplementedError):
    """The error of `get_config`.

    It is also a `NotImplementedError`, since Keras catches this where it can do without a config.
    """

    def __init__(self):
        super().__init__(
            'a ParallelModel p has no config, for clone_model or save_model: call p.save, or make '
            'keras.models.clone_model(p.inner_model) and give that to towers.ParallelModel.')


@functools.lru_cache(maxsize=None)
def _parallel_class(base: type) -> type:
    """The class of parallel models; `base` is the class of functional models of a Keras."""
    metaclass = type(base)
    return metaclass('ParallelModel', (_ParallelMethods, base), {'__doc__': ParallelModel.__doc__})


class _ParallelMethods(_WeightsOfInner):
    """A mix-in: the methods in which parallel models differ from Keras' models."""

    def __init__(self, keras: typing.Any, model_towers: KerasTowers):
        """Makes a model of one layer, which calls the model inside in towers.

        Args:
          keras: the Keras module of the model.
          model_towers: the model, with the devices of the towers.
        """
        # Past `__setattr__`, with which Keras would track what the object holds.
        self.__dict__['model_towers'] = model_towers
        inner = model_towers.model
        backend = compat.keras_backend_of(inner)
        # Keras makes the placeholder of the learning phase when it is first asked for it. It is
        # asked here; else the first tower would ask, and the placeholder be on that tower's device.
        backend.learning_phase()
        name = backend.unique_object_name('parallel_model', zero_based=True)
        inputs = list(inner.inputs)
        layer = _layer_class(keras.layers.Layer)(model_towers, name=name + '_towers')
        outputs = layer(one_or_list(inputs))
        super().__init__(inputs=inputs, outputs=tf.nest.flatten(outputs), name=name)
        # `fit` takes labels and losses by these names: the names of the outputs of the model
        # inside, not the name of the one layer here. Past `__setattr__` again.
        self.__dict__['output_names'] = list(inner.output_names)

    inner_model = property(lambda self: self.model_towers.model)
    devices = property(lambda self: self.model_towers.devices)
    plan = property(lambda self: self.model_towers.builds[0].plan)

    def __call__(self, *args, **keywords):
        """Calls the model, as Keras does; raises `ModelFunctionError` within a model function of
        `build_towers`, which cuts the batch already."""
        # `build_towers` would also raise this error, but within the `call` of a layer, where
        # AutoGraph changes the text of an error.
        check_not_nested(tf.get_default_graph())
        return super().__call__(*args, **keywords)

    def get_config(self):
        """Raises: a parallel model cannot be made from a config."""
        raise _NoConfigError()

    summary = property(lambda self: self.inner_model.summary)
    save_weights = property(lambda self: self.inner_model.save_weights)
    load_weights = property(lambda self: self.inner_model.load_weights)

    def save(self, *args: typing.Any, **keywords: typing.Any) -> None:
        """Saves the inner model; the arguments are those of Keras' `save`.

        An inner model that was not compiled itself is first compiled with the optimizer of this
        model, so that the optimizer's state is saved.
        """
        inner = self.inner_model
        saves_optimizer = _is_compiled(self) and keywords.get('include_optimizer', True)
        # An output that is a scalar in the inner model is [batch, 1] in this model. The loss of
        # this model takes [batch, 1], so the inner model cannot be compiled with this loss.
        has_scalar_output = any(output.shape.ndims == 0 for output in inner.outputs)
        if saves_optimizer and not _is_compiled(inner) and not has_scalar_output:
            inner.compile(self.optimizer, loss=self.loss, loss_weights=self.loss_weights)
        return inner.save(*args, **keywords)

    def compile(self, *args: typing.Any, **keywords: typing.Any) -> None:
        """Compiles the model; the arguments are those of Keras' `compile`.

        Raises:
          InvalidArgumentError: the optimizer does not train in graph mode.
        """
        super().compile(*args, **keywords)
        optimizer = getattr(self, 'optimizer', None)
        if optimizer and not hasattr(optimizer, 'get_updates'):
            name = type(optimizer).__name__
            raise InvalidArgumentError(
                'compile(optimizer=%s(…)): Keras trains in graph mode by optimizers with '
                'get_updates: give keras.optimizers.legacy.%s, a name such as %r, or a '
                'tf.train.Optimizer.' % (name, name, name.lower()))

    def get_updates_for(self, inputs):
        """The updates that depend on `inputs`, as Keras gives them, without updates of frozen
        layers.

        The one layer of this model got the updates of all layers inside when it was called. A layer
        inside may have been frozen since then, so each layer is asked now, when Keras trains.
        """
        frozen_updates = set()
        for layer, op in self.model_towers.updates:
            if _does_not_update(layer):
                frozen_updates.add(op)
        return [update for update in super().get_updates_for(inputs)
                if operation_of(update) not in frozen_updates]

    # `compile` notes which layers are trained, and Keras trains these.
    def _get_trainable_state(self) -> typing.Any:
        """Returns which layers are trained: the layers of the inner model, and this model."""
        state = self.inner_model._get_trainable_state()
        state[self] = self.trainable
        return state

    def _set_trainable_state(self, state: typing.Any) -> None:
        """Sets which layers of the inner model are trained."""
        self.inner_model._set_trainable_state(state)

    def _make_train_function(self) -> None:
        """Makes Keras' train function, with the gradients on the devices of the towers."""
        with tf.device(device_of_gradient), Recording(tf.get_default_graph()) as made:
            super()._make_train_function()
        # The gradient of a loop keeps values on stacks, which belong on the device of the loop.
        keep_stacks_with_loops(made.operations)


def _does_not_update(layer: typing.Any) -> bool:
    """Whether a layer does not update its state in a training: it is frozen, and not stateful. A
    stateful layer, as Keras has it, goes on with its state whether it is trained or not."""
    is_stateful = getattr(layer, 'stateful', False)
    return not layer.trainable and not is_stateful


def _is_compiled(model: typing.Any) -> bool:
    """Whether the program has called `compile` of a Keras model."""
    return bool(getattr(model, 'optimizer', None))
