"""A Keras model in towers: inputs cut, the model called on each device, outputs merged.

Its test is `tests/fronts/test_keras_model.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.build import build_towers
from towers.api.built import BuiltTowers
from towers.model.keras_calls import record_keras_calls
from towers.model.outputs import weighted_mean
from towers.placement.devices import Devices
from towers.placement.variable_device import only_device
from towers.whole_batch.predictions import RowsOfExamples


class Called(typing.NamedTuple):
    """What one call of a model in all towers gives, for the whole batch."""
    outputs: typing.List[typing.Any]  # tensors [batch, …]
    masks: typing.List[typing.Any]  # of the outputs; None for one without a mask
    losses: typing.List[tf.Tensor]  # scalars that layers add
    updates: typing.List[typing.Any]  # operations of batch norm and the like


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
        self.builds: typing.List[BuiltTowers] = []
        self.updates: typing.List[typing.Tuple[typing.Any, tf.Operation]] = []

    def on(self, inputs: list, masks: list, training: typing.Any) -> Called:
        """Calls the model in every tower on its shard of the batch.

        Args:
          inputs: list of tensors [batch, …], in the order of the model's inputs.
          masks: list of masks or Nones, one an input.
          training: as Keras gives it to `call`.
        """
        records: typing.List[typing.Any] = []

        def call_model(inputs: list, masks: list) -> dict:
            """One tower's call of the Keras model, on its shard.

            In Keras every output has a row for each example, so the outputs are `RowsOfExamples`.
            Their logits go along, because Keras' cross entropies take these in the place of
            probabilities.
            """
            with record_keras_calls() as record, compat.autograph_of_layers():
                outputs = _call(self.model, inputs, masks, training)
            records.append(record)
            rows = _batch_size(inputs[0])
            return {'predictions': RowsOfExamples({
                'outputs': [_with_batch_dimension(output, rows) for output in outputs],
                'logits': [_logits(output) for output in outputs],
                'masks': [compat.keras_mask(output) for output in outputs]})}

        # By calls, as copies of loops have no gradient.
        with tf.name_scope('copies'):
            built = build_towers(call_model, (inputs, masks), None, self.devices, 'mean',
                                 remainder='weight', copies='reuse')
            with only_device('/device:CPU:0'):
                outputs = _merged_outputs(built)
                losses = _mean_losses(records, built)
        layer_updates = records[0].updates_of_layers()
        self.builds.append(built)
        self.updates.extend(layer_updates)
        updates = [op for _, op in layer_updates]
        known = set(updates)
        other_updates = [update for update in built.towers[0].updates
                         if getattr(update, 'op', update) not in known]
        return Called(outputs, built.predictions.rows['masks'], losses, updates + other_updates)


def _merged_outputs(built: BuiltTowers) -> typing.List[typing.Any]:
    """The outputs of the whole batch, with their logits where Keras looks for them."""
    merged = built.predictions.rows
    in_first_tower = built.towers[0].predictions.rows['outputs']
    return [_with_logits(output, logits, in_tower) for output, logits, in_tower in
            zip(merged['outputs'], merged['logits'], in_first_tower)]


def _mean_losses(records: typing.List[typing.Any], built: BuiltTowers) -> typing.List[tf.Tensor]:
    """The losses that layers add, each the mean over the towers, weighted by their examples;
    `records` are of the calls of the model, one a tower."""
    sizes = [tower.size for tower in built.towers]
    num_examples = tf.cast(sum(sizes), tf.float64)
    weights = [tf.cast(size, tf.float64) / num_examples for size in sizes]
    losses_of_towers = [record.activity_losses(on_keras_input=True) for record in records]
    return [weighted_mean(terms, weights) for terms in zip(*losses_of_towers)]


def _call(model: typing.Any, inputs: list, masks: list, training: typing.Any) -> list:
    """The outputs of a call, in the order of `model.outputs`; a model may return a dict.

    Args:
      model: the Keras model.
      inputs, masks: the arguments of `KerasTowers.on`, cut for one tower.
      training: as Keras gives it to `call`.
    """
    arguments: typing.Dict[str, typing.Any] = {}
    if training is not None:
        arguments['training'] = training
    if any(mask is not None for mask in masks):
        arguments['mask'] = one_or_list(masks)
    return tf.nest.flatten(model(one_or_list(inputs), **arguments))


def one_or_list(values: list) -> typing.Any:
    """The one value of a list of one, as Keras gives and takes it; else the list."""
    return values[0] if len(values) == 1 else values


# Operations whose input Keras' cross entropies take in place of their output: the loss of the
# probabilities, which are 0 and 1 in the end, has neither value nor gradient there. Keras looks for
# it at the tensor and, on TF 1.15 always, at its operation.
_ACTIVATIONS = {'Sigmoid': tf.sigmoid, 'Softmax': tf.nn.softmax}


def _logits(output: typing.Any) -> typing.Optional[tf.Tensor]:
    """The logits that Keras' cross entropies take in place of an output [rows, …]; or None."""
    if not isinstance(output, tf.Tensor) or output.shape.ndims == 0:
        return None
    logits = compat.keras_logits(output)
    if logits is None and output.op.type in _ACTIVATIONS:
        logits = output.op.inputs[0]
    return logits


def _with_logits(merged: typing.Any, logits: typing.Any, in_tower: typing.Any) -> typing.Any:
    """A merged output, with its merged logits, or None, where Keras looks for them; `in_tower` is
    the output of the first tower, which says where that is."""
    if logits is None:
        return merged
    if compat.keras_logits(in_tower) is None:
        return _ACTIVATIONS[in_tower.op.type](logits)
    compat.set_keras_logits(merged, logits)
    return merged


def _batch_size(tensor: tf.Tensor) -> typing.Any:
    """The size of the first dimension: a number where it is static, else a scalar."""
    static = tensor.shape.as_list()[0]
    return tf.shape(tensor)[0] if static is None else static


def _with_batch_dimension(output: typing.Any, rows: typing.Any) -> typing.Any:
    """A scalar as [rows, 1], the same for each example, so that its mean over them is weighted."""
    if isinstance(output, tf.Tensor) and output.shape.ndims == 0:
        return tf.fill([rows, 1], output)
    return output


def device_of_gradient(op: tf.Operation) -> str:
    """The device of an operation: a function for `tf.device` around code that takes gradients
    through several towers.

    Keras' optimizers take the gradient of one loss through all towers of a model, without a device
    or a way to name one. What TensorFlow makes as the gradient of an operation goes to the device
    of that operation; the sums for a weight, and the counters of loops, to none.
    """
    if op.device:
        return op.device
    forward = compat.differentiated_operation(op)
    return '' if forward is None else forward.device
