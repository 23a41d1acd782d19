"""A Keras model in towers: inputs cut, the model called on each device, outputs merged."""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.build import build_towers
from towers.placement.devices import Devices
from towers.placement.variable_device import only_device
from towers.tower.keras_calls import record_keras_calls
from towers.tower.outputs import weighted_mean


class KerasTowers:
    """One Keras model in the towers of builds without an optimizer. It is no layer: Keras takes up
    every layer that is an attribute of a layer, and would count the model twice.

    Attributes:
      model: the Keras model, whose weights all towers share.
      devices: `Devices`.
      builds: `BuiltTowers` of each call, the one on the model's own inputs first.
      updates: `[(layer, op)]` of the first towers: batch norm's, and what else layers update.
    """

    def __init__(self, model: typing.Any, devices: Devices):
        self.model = model
        self.devices = devices
        self.builds = []
        self.updates = []

    def on(self, inputs: list, masks: list, training: typing.Any) -> tuple:
        """Calls the model in every tower on its part of the batch.

        Args:
          inputs: list of tensors [batch, …], in the order of the model's inputs.
          masks: list of masks or Nones, one an input.
          training: as Keras gives it to `call`.

        Returns:
          `(outputs, masks, losses, updates)`: tensors [batch, …], their masks or Nones, scalar
          losses that layers add, and the operations of batch norm and the like.
        """
        records = []

        def call_model(inputs, masks):
            with record_keras_calls() as record, compat.autograph_of_layers():
                outputs = _call(self.model, inputs, masks, training)
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
            with only_device('/device:CPU:0'):
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


# Operations whose input Keras' cross entropies take in place of their output: the loss of the
# probabilities, which are 0 and 1 in the end, has neither value nor gradient there. Keras looks for
# it at the tensor and, on TF 1.15 always, at its operation.
_ACTIVATIONS = {'Sigmoid': tf.sigmoid, 'Softmax': tf.nn.softmax}


def _logits(output):
    """The logits that Keras' cross entropies take in place of an output [rows, …]; or None."""
    if not isinstance(output, tf.Tensor) or output.shape.ndims == 0:
        return None
    logits = compat.keras_logits(output)
    if logits is None and output.op.type in _ACTIVATIONS:
        logits = output.op.inputs[0]
    return logits


def _of_logits(merged, logits, of_tower):
    """The merged output, with its logits where Keras looks for them."""
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


def device_of_gradient(op):
    """A device function, for `tf.device` around code that takes gradients through several towers.

    Keras' optimizers take the gradient of one loss through all towers of a model, without a device
    or a way to name one. What TensorFlow makes as the gradient of an operation goes to the device
    of that operation; the sums for a weight, and the counters of loops, to none.
    """
    of = compat.differentiated_operation(op)
    return op.device or (of.device if of is not None else '')
