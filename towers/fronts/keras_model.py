"""`ParallelModel`: a Keras model over several devices, itself a Keras model with `fit`."""

import contextlib
import functools
import re
import sys

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_flag, check_graph_mode
from towers.errors import DeviceError, InvalidArgumentError, MissingPackageError
from towers.fronts.keras_towers import (MERGED_ON, KerasTowers, gradient_devices,
                                        identity_for_losses)
from towers.graph.graph_walk import Recording
from towers.placement.devices import (check_one_stage, needs_config, resolve_devices,
                                      short_name)
from towers.placement.loop_state_devices import keep_stacks_with_loops
from towers.tower.build_context import check_not_nested


_SCOPE = re.compile(r'[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*')


class _OfEveryKeras(type):
    """Makes `ParallelModel(…)` return an instance of a class derived from its Keras' `Model`."""

    def __call__(cls, model, devices=None, name=None, check_devices=True,
                 allow_repeated_devices=False):
        check_flag('check_devices', check_devices)
        check_flag('allow_repeated_devices', allow_repeated_devices)
        keras = _checked_keras(model)
        devices = resolve_devices(devices, check_devices, allow_repeated_devices)
        check_one_stage('ParallelModel', devices)
        if name is not None and (not isinstance(name, str) or not _SCOPE.fullmatch(name)):
            raise InvalidArgumentError(
                'name=%.80r: expected a name of letters, digits, "_", "-", "." and "/", or None.'
                % (name,))
        model_towers = KerasTowers(model, devices)
        base = type(keras.Model(model.inputs, model.outputs))  # on 2.15 `Functional`
        return _parallel_class(base, type(model).__name__)(keras, model_towers, name)

    def __instancecheck__(cls, instance):
        return getattr(type(instance), 'is_parallel_model', False)


class ParallelModel(metaclass=_OfEveryKeras):
    """A Keras model that computes each batch on several devices, one part of it on each.

        model = towers.ParallelModel(model, devices=2)
        model.compile('sgd', 'mse')
        model.fit(x, y, batch_size=64)

    The result is a `Model` of the same Keras as the given model: `tf.keras` of TF 1.15 and 2.15 or
    tf_keras, in graph mode, in the default graph and with Keras' session. Inputs are cut on the
    CPU, the tower of each device calls the one model, and outputs are put together in batch order
    on the CPU, under the model's output names. Losses and metrics are computed from the merged
    outputs, so they and the gradients are those of one device on the whole batch, whatever the
    sizes of the parts: n examples on N devices are cut as with `remainder='weight'` of
    `build_towers`. With fewer examples than devices, the other devices get the first example again,
    which does not count there. Gradients are computed on the devices of the towers.

    Batch norm normalises each part by itself; its moving statistics come from the first tower. A
    loss that layers add counts once: regularizers of weights as they are, `add_loss` of tensors and
    activity regularizers as the mean over the parts, weighted by their examples. A scalar output,
    such as a loss, becomes [batch, 1]: each example has the value of its part, so that the mean
    over the batch is the weighted mean.

    `layers`, `get_layer`, `summary`, `save`, `save_weights`, `load_weights`, `get_config`,
    `to_json` and `to_yaml` are those of the model inside, and callbacks such as `ModelCheckpoint`
    use them: the saved model is a model for one device. Unless the program has compiled the model
    inside, `save` compiles it with the optimizer and loss of the `ParallelModel`, so that the
    optimizer's state is in the file.

    Virtual CPUs need a session with this config, set before the first weight is loaded or trained:

        keras.backend.set_session(tf.Session(config=towers.session_config(2)))

    Args:
      model: a functional or a built `Sequential` model. It stays usable.
      devices: as for `build_towers`: None, a count, or names such as `['/gpu:0', '/gpu:2']`.
      name: the model's name; None for Keras' choice.
      check_devices: False for a graph that another machine is to run.
      allow_repeated_devices: may two towers share a device?

    Attributes:
      inner_model: the given model.
      devices: names of the towers' devices.
      plan: `Plan` of the towers; print it.

    Raises:
      InvalidArgumentError: `model` is no model of such a Keras; it has no fixed inputs, stateful
        RNNs, or layers that add metrics; it is of another graph; TensorFlow executes eagerly.
      DeviceError: as `build_towers`; at the first run, where the session lacks the virtual CPUs.
      MissingPackageError: a model of Keras 3, whose `fit` does not work in graphs.
    """


def _checked_keras(model):
    """The Keras module of a model that towers can call; else raises, see `ParallelModel`."""
    if compat.is_keras_3(model):
        raise MissingPackageError(
            'ParallelModel: %s is a model of Keras 3, which cannot fit, evaluate or predict in '
            'graph mode. Call it in the model function of towers.build_towers, which trains it by '
            'a tf.train.Optimizer; or install tf-keras and set the environment variable '
            'TF_USE_LEGACY_KERAS=1 before tf.keras is first used.' % _named(model))
    keras = compat.keras_of(model)
    if keras is None:
        raise InvalidArgumentError(
            'ParallelModel takes a tf.keras or tf_keras model, and was given %.80r of type %s.'
            % (model, type(model).__name__))
    check_graph_mode('ParallelModel')
    if not getattr(model, 'inputs', None) or not getattr(model, 'outputs', None):
        raise InvalidArgumentError(
            'ParallelModel: %s has no inputs yet, so that its towers cannot be made: give the '
            'first layer of a Sequential an input_shape=, make a subclassed model a functional one '
            '(keras.Model(x, model(x)) with x = keras.Input(…)), or call the model in the model '
            'function of towers.build_towers.' % _named(model))
    if not compat.is_keras_graph_network(model):
        raise InvalidArgumentError(
            'ParallelModel: %s is a subclassed model of type %s, with no graph of layers to call '
            'for each tower: make it a functional one (keras.Model(x, model(x)) with x = '
            'keras.Input(…)), or call it in the model function of towers.build_towers.'
            % (_named(model), type(model).__name__))
    for name, tensor in zip(model.input_names, model.inputs):
        if not isinstance(tensor, tf.Tensor):
            raise InvalidArgumentError(
                'ParallelModel: the input %r of %s is a %s: give the model a dense input, or call '
                'it in the model function of towers.build_towers, which cuts sparse ones.' % (
                    name, _named(model), type(tensor).__name__))
    if any(tensor.graph is not tf.get_default_graph() for tensor in model.inputs):
        raise InvalidArgumentError(
            'ParallelModel: %s belongs to another graph than the default one: make both under the '
            'same tf.Graph().as_default(), after keras.backend.clear_session() if that is called.'
            % _named(model))
    _check_parts(model, keras)
    return keras


def _check_parts(model, keras):
    for part in compat.keras_parts(model):
        if isinstance(part, ParallelModel):
            raise InvalidArgumentError(
                'ParallelModel: %s is a ParallelModel already: give the inner_model of that one.'
                % _named(part))
        if isinstance(part, keras.Model):
            continue
        if getattr(part, 'stateful', False) and hasattr(part, 'reset_states'):
            raise InvalidArgumentError(
                'ParallelModel: the layer %r of %s is stateful: it keeps a state for each example '
                'of a whole batch, and each tower has a part of it. Make it with stateful=False, '
                'and pass the state as initial_state= from an input and out as an output; or call '
                'the layer in the model function of towers.build_towers, made there, where each '
                'tower has a state of its own.' % (part.name, _named(model)))
        if getattr(part, 'metrics', None):
            raise InvalidArgumentError(
                'ParallelModel: the layer %r of %s adds a metric of its own, which each tower '
                'would add: make what it is computed from an output, and give the metric to '
                'compile(metrics=…).' % (part.name, _named(model)))


def _named(model):
    return 'the model %r' % getattr(model, 'name', model)


@functools.lru_cache(maxsize=None)
def _layer_class(layer):
    """A class of layers that hold `KerasTowers`, derived from a Keras' `Layer`."""

    class TowersOfModel(layer):  # pylint: disable=missing-docstring
        def __init__(self, model_towers, **keywords):
            self.__dict__['model_towers'] = model_towers
            super().__init__(autocast=False, **keywords)  # inputs and outputs are the model's own
            self.supports_masking = True
            # Losses of weights, which do not depend on the inputs of the towers.
            for _, loss in compat.keras_weight_losses(model_towers.model):
                self.add_loss(loss)

        # AutoGraph is for the user's layers, not for what makes towers.
        @tf.autograph.experimental.do_not_convert
        def call(self, inputs, training=None, mask=None):  # pylint: disable=missing-docstring
            inputs = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            masks = (list(mask) if isinstance(mask, (list, tuple)) else [mask] * len(inputs))
            outputs, self.__dict__['merged_masks'], losses, updates = self.model_towers.on(
                inputs, masks, training)
            for loss in losses:
                self.add_loss(loss)
            if updates:
                self.add_update(updates)
            return outputs if len(outputs) > 1 else outputs[0]

        def compute_mask(self, inputs, mask=None):  # pylint: disable=missing-docstring
            masks = self.__dict__['merged_masks']
            return masks if len(masks) > 1 else masks[0]

        def get_config(self):  # pylint: disable=missing-docstring
            raise _not_cloned()

        trainable = _trainable_of_inner_model()
        trainable_weights = property(lambda self: self.model_towers.model.trainable_weights)
        non_trainable_weights = property(lambda self: self.model_towers.model.non_trainable_weights)
        weights = property(lambda self: self.model_towers.model.weights)

    class Merged(layer):
        """Passes one output on, under its name."""

        def __init__(self, **keywords):
            super().__init__(autocast=False, **keywords)
            self.supports_masking = True

        def call(self, inputs):  # pylint: disable=missing-docstring
            with tf.device(MERGED_ON):
                return identity_for_losses(inputs)

    return TowersOfModel, Merged


class _NotCloned(InvalidArgumentError, NotImplementedError):
    """Also the type that Keras expects from a layer without a config, where it needs none."""


def _not_cloned():
    return _NotCloned(
        'a ParallelModel p cannot be cloned or made from a config, which would be that of the '
        'model inside: make keras.models.clone_model(p.inner_model), or '
        'p.inner_model.from_config(…), and give that to towers.ParallelModel.')


def _trainable_of_inner_model():
    """The property `trainable`, passed on to the inner model; an equal value changes no layer."""
    def get(self):
        model_towers = self.__dict__.get('model_towers')
        return True if model_towers is None else model_towers.model.trainable

    def put(self, value):
        model_towers = self.__dict__.get('model_towers')
        if model_towers is not None and value != model_towers.model.trainable:
            model_towers.model.trainable = value
    return property(get, put)


_OF_INNER = ('get_layer', 'summary', 'save_weights', 'load_weights', 'get_config', 'to_json',
             'to_yaml', 'get_weights', 'set_weights', 'count_params')


@functools.lru_cache(maxsize=None)
def _parallel_class(base, name_of_inner):
    """The class of parallel models that derives from a Keras' class of functional models.

    It has the name of the inner model's class, which `keras.models.save_model` writes beside that
    model's config and weights: the file is then the same as that of `save`.
    """
    methods = {name: _of_inner(name, getattr(base, name))
               for name in _OF_INNER if hasattr(base, name)}
    return type(base)(name_of_inner, (_ParallelMethods, base), dict(
        methods, __doc__=ParallelModel.__doc__, __qualname__='ParallelModel', __module__=__name__))


def _of_inner(name, original):
    """A method that calls the inner model's method of the same name."""
    @functools.wraps(original)
    def call_inner(self, *args, **keywords):
        return getattr(self.inner_model, name)(*args, **keywords)
    return call_inner


class _ParallelMethods:
    """The methods of every parallel model, before those of its Keras' class."""
    is_parallel_model = True

    def __init__(self, keras, model_towers, name):
        self.__dict__['model_towers'] = model_towers
        self.__dict__['when_compiled'] = None
        inner = model_towers.model
        backend = compat.keras_backend_of(inner)
        backend.learning_phase()  # here, not on the first tower's device
        towers_layer, merged = _layer_class(keras.layers.Layer)
        name = name or backend.unique_object_name('parallel_model', zero_based=True)
        inputs = list(inner.inputs)
        made = towers_layer(model_towers, name=name + '_towers')(
            inputs if len(inputs) > 1 else inputs[0])
        made = list(made) if isinstance(made, (list, tuple)) else [made]
        super().__init__(inputs=inputs, outputs=[
            merged(name=output_name)(output)
            for output_name, output in zip(inner.output_names, made)], name=name)

    inner_model = property(lambda self: self.model_towers.model)
    devices = property(lambda self: self.model_towers.devices)
    plan = property(lambda self: self.model_towers.builds[0].plan)
    trainable = _trainable_of_inner_model()

    def __call__(self, *args, **keywords):
        check_not_nested(tf.get_default_graph())  # here, where AutoGraph rewords no error
        return super().__call__(*args, **keywords)

    @property
    def layers(self):
        if sys._getframe(1).f_code.co_name == 'get_network_config':
            raise _not_cloned()  # in TF 2's clone_model, which would look for these for ever
        return self.model_towers.model.layers

    weights = property(lambda self: self.model_towers.model.weights)
    trainable_weights = property(lambda self: self.model_towers.model.trainable_weights)
    non_trainable_weights = property(lambda self: self.model_towers.model.non_trainable_weights)

    @property
    def metrics_names(self):
        # TF 1.15 looks for those of `add_metric` among `layers`, which are the inner model's.
        names = list(super().metrics_names)
        return names + [metric.name for metric in self.metrics if metric.name not in names]

    @classmethod
    def from_config(cls, config, custom_objects=None):
        raise _not_cloned()

    def save(self, *args, **keywords):
        if keywords.get('include_optimizer', True):
            self._compile_inner()
        return self.inner_model.save(*args, **keywords)

    def compile(self, *args, **keywords):
        super().compile(*args, **keywords)
        if getattr(self, 'optimizer', None) and not hasattr(self.optimizer, 'get_updates'):
            raise InvalidArgumentError(
                'compile(optimizer=%s(…)): Keras trains in graph mode by optimizers with '
                'get_updates: give keras.optimizers.legacy.%s, a name such as %r, or a '
                'tf.train.Optimizer.' % ((type(self.optimizer).__name__,) * 2
                                         + (type(self.optimizer).__name__.lower(),)))
        self.__dict__['when_compiled'] = [
            (part, part.trainable) for part in compat.keras_parts(self.inner_model)]

    def get_updates_for(self, inputs):
        frozen = {op for layer, op in self.model_towers.updates
                  if not layer.trainable and not getattr(layer, 'stateful', False)}
        return [update for update in super().get_updates_for(inputs)
                if getattr(update, 'op', update) not in frozen]

    # The session is looked at last: it would take up loops of TF 2 as they are before their
    # gradients are made, and refuse them after that.
    def _make_train_function(self):
        self._check_graph()
        with _set_trainable(self.when_compiled or ()), tf.device(
                gradient_devices(self.devices, self.weights)), Recording(
                    tf.get_default_graph()) as made:
            super()._make_train_function()
        keep_stacks_with_loops(made.operations)
        self._check_session()

    def _make_test_function(self):
        self._check_graph()
        super()._make_test_function()
        self._check_session()

    def _make_predict_function(self):
        self._check_graph()
        super()._make_predict_function()
        self._check_session()

    def _check_graph(self):
        if any(each.graph is not tf.get_default_graph() for each in self.inputs):
            raise InvalidArgumentError(
                'the ParallelModel %r belongs to another graph than the default one: make it '
                'again from a model that is made there (its weights go over by save_weights '
                'and load_weights); or leave out keras.backend.clear_session(), or that '
                'tf.Graph().as_default(), in between.' % self.name)

    def _check_session(self):
        if not needs_config(self.devices):
            return
        try:
            listed = [device.name for device in compat.keras_backend_of(
                self.inner_model).get_session().list_devices()]
        except tf.errors.InvalidArgumentError as error:  # raised for what it initializes
            if 'Cannot assign a device' not in str(error):
                raise
            listed = ()
        missing = [name for name in self.devices if tf.DeviceSpec.from_string(name).device_index
                   and '/job:' not in name and not any(each.endswith(name) for each in listed)]
        if missing:
            raise DeviceError(
                "Keras' session has no %s, which is a virtual CPU: before weights are loaded "
                'or trained, call keras.backend.set_session(tf.Session('
                'config=towers.session_config(%r))), with tf.compat.v1.keras on TF 2.'
                % (short_name(missing[0]), [short_name(each) for each in self.devices]))

    def _compile_inner(self):
        inner = self.inner_model
        scalars = [name for name, output in zip(inner.output_names, inner.outputs)
                   if output.shape.ndims == 0]
        if getattr(inner, 'optimizer', None) or not getattr(self, 'optimizer', None) or scalars:
            return
        inner.compile(self.optimizer, loss=self.loss, loss_weights=self.loss_weights)


@contextlib.contextmanager
def _set_trainable(flags):
    """The context in which layers have the `trainable` flags from when the model was compiled."""
    before = [(part, part.trainable) for part, _ in flags]
    # A layer sets its parts' flags with its own, and comes before them.
    for part, flag in flags:
        part.trainable = flag
    try:
        yield
    finally:
        for part, flag in before:
            part.trainable = flag
