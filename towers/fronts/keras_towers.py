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

        # By calls, as copies of loops have no gradient.
        with tf.name_scope('copies'):
            built = build_towers(call_model, (inputs, masks), None, self.devices, 'mean',
                                 remainder='weight', copies='reuse')
            merged, towers = built.predictions, built.towers
            with only_device(MERGED_ON):
                outputs = [_of_logits(*each) for each in zip(
                    merged['outputs'], merged['logits'], towers[0].predictions['outputs'])]
                count = tf.cast(sum(tower.size for tower in towers), tf.float64)
                weights = [tf.cast(tower.size, tf.float64) / count for tower in towers]
                losses = [weighted_mean(terms, weights) for terms in zip(*[
                    record.activity_losses(on_keras_input=True) for record in records])]
        of_layers = records[0].updates_of_layers()
        known = {op for _, op in of_layers}
        others = [update for update in towers[0].updates
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


def _with_batch_dimension(output, rows):
    """A scalar as [rows, 1], the same for each example, so that its mean over them is weighted."""
    if isinstance(output, tf.Tensor) and output.shape.ndims == 0:
        return tf.fill([rows, 1], output)
    return output


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


_GRADIENTS = re.compile(r'(?:^|/)gradients(?:_\d+)?/')


def gradient_devices(devices, weights):
    """A device function, for `tf.device` around code that takes gradients through several towers.

    Keras' optimizers take the gradient of one loss through all towers of a model, without a device
    or a way to name one. What TensorFlow makes as the gradient of an operation goes to the device
    of that operation. Other gradient operations (zeros for a branch that is not taken) go to the
    device of those that they read; where these are of several towers (the sums for a weight), to
    the weights' device.

    Args:
      devices: names of the towers' devices.
      weights: the variables that the gradient is taken of.
    """
    of_towers, of_weights = set(devices), {weight.device for weight in weights}

    def device_of(op):
        if op.device:
            return op.device
        of = compat.differentiated_operation(op)
        if of is not None:
            return of.device
        if not _GRADIENTS.search(op.name) or _of_loop(op):
            return ''
        read = {tensor.device for tensor in op.inputs} & of_towers
        chosen = read if len(read) < 2 else of_weights
        return min(chosen) if len(chosen) == 1 else ''
    return device_of


def _of_loop(op):
    """Whether an operation is in a TF1 loop or leads into one.

    The counters of a loop have to be on one device: otherwise the loops of two towers wait for each
    other for ever.
    """
    return op.type == 'Enter' or any(compat.in_control_flow(tensor.op) for tensor in op.inputs)
