"""A Keras model in towers: inputs cut, the model called on each device, outputs merged."""

import contextlib
import random
import re
import zlib

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.build import build_towers
from towers.graph.graph_walk import Recording
from towers.placement.variable_device import only_device
from towers.tower.keras_calls import record_keras_calls
from towers.tower.outputs import weighted_mean

MERGED_ON = '/device:CPU:0'


class KerasTowers:
    """One Keras model in the towers of builds without an optimizer.

    A plain object, so that Keras, which takes over every layer that is an attribute of a layer,
    does not count the model twice.

    Attributes:
      model: the Keras model, whose weights all towers share.
      devices: `Devices`.
      builds: `BuiltTowers` of each call, the one on the model's own inputs first.
      updates: `[(layer, op)]` of the first towers: batch norm's, and what else layers update.
    """

    def __init__(self, model, devices):
        self.model = model
        self.devices = devices
        self.builds = []
        self.updates = []

    def on(self, inputs, masks, training):
        """Calls the model in every tower on its part of the batch.

        Args:
          inputs: list of tensors [batch, …], in the order of the model's inputs.
          masks: list of masks or Nones, one an input.
          training: as Keras gives it to `call`.

        Returns:
          `(outputs, masks, losses, updates)`: tensors [batch, …], their masks or Nones, scalar
          losses that layers add, and the operations of batch norm and the like.
        """
        records, first, graph = [], [], tf.get_default_graph()

        def call_model(inputs, masks):
            redraws = any(op.type == 'IdentityN' for op in first)
            with record_keras_calls() as record, compat.autograph_of_layers(), _seed_of_tower(
                    graph, len(records), redraws), Recording(graph) as made:
                outputs = _call(self.model, inputs, masks, training)
            first.extend([] if records else made.operations)
            records.append(record)
            rows = _batch_size(inputs[0])
            return {'predictions': {
                'outputs': [_with_batch_dimension(output, rows) for output in outputs],
                'logits': [_logits(output) for output in outputs],
                'masks': [compat.keras_mask(output) for output in outputs]}}

        with tf.name_scope('copies'):
            with only_device(MERGED_ON):
                count = _batch_size(inputs[0])
                padded = _padded_size(inputs[0], len(self.devices))
                inputs, masks = ([_padded(each, padded) for each in nest]
                                 for nest in (inputs, masks))
            # By calls, as copies of loops have no gradient.
            built = build_towers(call_model, (inputs, masks), None, self.devices, 'mean',
                                 remainder='weight', copies='reuse')
            with only_device(MERGED_ON):
                merged = {key: [_unpadded(each, count, padded) for each in built.predictions[key]]
                          for key in ('outputs', 'logits', 'masks')}
                outputs = [_of_logits(output, logits, of_tower) for output, logits, of_tower in
                           zip(merged['outputs'], merged['logits'],
                               built.towers[0].predictions['outputs'])]
                losses = [weighted_mean(terms, _weights(built.towers, count)) for terms in
                          zip(*[record.activity_losses(on_keras_input=True)
                                for record in records])]
        of_layers = records[0].updates_of_layers()
        known = {op for _, op in of_layers}
        others = [update for update in built.towers[0].updates
                  if getattr(update, 'op', update) not in known]
        self.builds.append(built)
        self.updates.extend(of_layers)
        return outputs, merged['masks'], losses, [op for _, op in of_layers] + others


def _call(model, inputs, masks, training):
    """The model's outputs as a list, in the order of `model.outputs`; a model may return a dict."""
    given = {} if training is None else {'training': training}
    if any(mask is not None for mask in masks):
        given['mask'] = masks if len(masks) > 1 else masks[0]
    return tf.nest.flatten(model(inputs if len(inputs) > 1 else inputs[0], **given))


# Operations whose input Keras' cross entropies take in place of their output.
_ACTIVATIONS = {'Sigmoid': tf.sigmoid, 'Softmax': tf.nn.softmax}


def identity_for_losses(tensor):
    """A copy of a tensor, of which a loss of Keras computes what it does of the tensor itself.

    Keras' cross entropies take the logits of an output that a sigmoid or softmax has made: the
    loss of the probabilities, which are 0 and 1 in the end, has neither value nor gradient there.
    Keras looks for them at the tensor and, on TF 1.15 always, at its operation.
    """
    of = tensor.op if isinstance(tensor, tf.Tensor) else None
    if of is not None and of.type in _ACTIVATIONS:
        copy = _ACTIVATIONS[of.type](of.inputs[0])
    else:
        copy = tf.identity(tensor)
    compat.set_keras_logits(copy, compat.keras_logits(tensor))
    return copy


def _logits(output):
    """What Keras' cross entropies take in place of an output [rows, …]; None for the output."""
    if not isinstance(output, tf.Tensor) or output.shape.ndims == 0:
        return None
    logits = compat.keras_logits(output)
    if logits is None and output.op.type in _ACTIVATIONS:
        logits = output.op.inputs[0]
    return logits


def _of_logits(merged, logits, of_tower):
    """The merged output, with its logits where Keras looks for them, see `identity_for_losses`."""
    if logits is None:
        return merged
    if compat.keras_logits(of_tower) is None:
        return _ACTIVATIONS[of_tower.op.type](logits)
    compat.set_keras_logits(merged, logits)
    return merged


def _batch_size(tensor):
    static = tensor.shape.as_list()[0]
    return tf.shape(tensor)[0] if static is None else static


def _padded_size(tensor, num_towers):
    """The size of a batch in which every tower has an example; None where this one is as large."""
    size = _batch_size(tensor)
    if isinstance(size, int):
        return None if size >= num_towers else num_towers
    return None if num_towers == 1 else tf.maximum(size, num_towers)


def _padded(tensor, size):
    """The batch, with its first example again at the end as often as is needed for that size.

    No tower is empty then: a mean over nothing, NaN, would stay in batch norm's statistics.
    """
    if tensor is None or size is None:
        return tensor
    missing = size - _batch_size(tensor)
    repeated = tf.tile(tensor[:1], tf.concat(
        [[missing], tf.ones([tf.rank(tensor) - 1], tf.int32)], 0))
    padded = tf.concat([tensor, repeated], 0)
    padded.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:])
                     if not isinstance(missing, int) else padded.shape)
    return padded


def _with_batch_dimension(output, rows):
    """A scalar as [rows, 1], the same for each example, so that its mean over them is weighted."""
    if isinstance(output, tf.Tensor) and output.shape.ndims == 0:
        return tf.fill([rows, 1], output)
    return output


def _unpadded(output, count, padded):
    """The output without the rows of repeated examples, which are the last ones."""
    if output is None or padded is None or not isinstance(output, tf.Tensor):
        return output
    rows = tf.shape(output)[0]
    # An example may have several rows.
    kept = output[:rows * count // padded]
    kept.set_shape(tf.TensorShape([None]).concatenate(output.shape[1:]))
    return kept


def _weights(towers, count):
    """Each tower's share of the batch, without repeated examples."""
    if len(towers) == 1:
        return [1.]
    return [tf.cast(tower.size * tf.cast(tower.index < count, tf.int32), tf.float64)
            / tf.cast(count, tf.float64) for tower in towers]


@contextlib.contextmanager
def _seed_of_tower(graph, index, redraws):
    """The context of the model's call in a tower: its random operations share no seed with others.

    The same seeds come from a layer's `seed=` (on TF 1.15; later Keras counts it up with each call)
    and, under a graph-level seed, in the branches of TF 2's `tf.cond`, which dropout makes under a
    learning phase. So the calls after the first are made under a graph-level seed of their own; but
    not where a gradient function, which comes later, may draw the same numbers again.

    Args:
      graph: `tf.Graph`.
      index: the tower's number.
      redraws: whether the model has operations with a gradient of their own.
    """
    seed = graph.seed
    if index and not redraws:
        tf.set_random_seed(random.randrange(1, 2 ** 31) if seed is None else
                           zlib.crc32(('%s copy %d' % (seed, index)).encode()) % 2 ** 31)
    try:
        yield
    finally:
        tf.set_random_seed(seed)


# A Keras optimizer makes gradients in its own scope `gradients`; TensorFlow makes another in it.
_GRADIENTS = re.compile(r'(?:^|/)(?:gradients(?:_\d+)?/)+')


class GradientDevices:
    """A device function, for `tf.device` around code that takes gradients through several towers.

    Keras' optimizers take the gradient of one loss through all towers of a model, without a device
    or a way to name one. `tf.gradients` names the gradient operations of `<scope>/op` by
    `gradients/<scope>/op_grad/`, and the functions of the gradient of a loop or a branch by the
    scope with `_` for `/`: so the tower's scope in the name tells the device. Gradient operations
    without such a name (zeros for a branch not taken) go to the device of the operations that they
    read; those that read several towers (the sums for a weight) go to the weights' device.

    An operation that has a device already, and any other operation, is left unchanged.
    """

    def __init__(self, builds, merged_on, weights):
        """
        Args:
          builds: list of `BuiltTowers` that the gradient may go through.
          merged_on: the device where batches are cut and outputs merged.
          weights: the variables that the gradient is taken of.
        """
        self._scopes = []
        for built in builds:
            towers = [(tower.name_scope, tower.device) for tower in built.towers]
            around = towers[0][0].rstrip('/').rpartition('/')[0]
            self._scopes += towers + [(around + '/', merged_on)]
        self._of_towers = {device for _, device in self._scopes}
        of_weights = {weight.device for weight in weights}
        self._of_weights = of_weights.pop() if len(of_weights) == 1 else ''

    def __call__(self, op):
        if op.device:
            return op.device
        place = _GRADIENTS.search(op.name)
        if place is not None:
            inside = op.name[place.end():]
            for scope, device in self._scopes:
                if inside.startswith(scope):
                    return device
        function = getattr(op.graph, 'name', None)  # of the body of a loop or a branch
        if isinstance(function, str):
            for scope, device in self._scopes:
                if '_' + scope.replace('/', '_') in '_' + function:
                    return device
        if place is not None and not _of_loop(op):
            read = {tensor.device for tensor in op.inputs} & self._of_towers
            if read:
                return read.pop() if len(read) == 1 else self._of_weights
        return op.device

    def scope(self):
        """The `tf.device` scope."""
        return tf.device(self)


def _of_loop(op):
    """Whether an operation is in a TF1 loop or leads into one.

    The counters of a loop have to be on one device: otherwise the loops of two towers wait for each
    other for ever.
    """
    return op.type == 'Enter' or any(compat.in_control_flow(tensor.op) for tensor in op.inputs)
