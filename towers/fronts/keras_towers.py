"""A Keras model in towers: inputs cut, the model called on each device, outputs merged.

Words of other modules used here: `record_keras_calls` notes what layers do in a block: the losses
that they add for their inputs (`activity_losses`), and the updates of their state;
`built.predictions.rows` is the structure that the function of a tower has returned, with the
tensors of the whole batch in it.

Its test is `tests/fronts/test_keras_model.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.build import build_towers
from towers.api.built import BuiltTowers
from towers.graph.graph_walk import names_of, operation_of
from towers.model.keras_calls import record_keras_calls
from towers.model.outputs import weighted_sum
from towers.placement.devices import Devices
from towers.placement.variable_device import only_device
from towers.whole_batch.predictions import RowsOfExamples


class Called(typing.NamedTuple):
    """The result of one call of a Keras model in all towers, for the whole batch.

    Attributes:
      outputs: tensors [batch, …].
      masks: the mask of each output; None for an output without one.
      losses: scalars that layers add with `add_loss`.
      updates: operations that update the state of layers, such as batch norm's averages.
    """
    outputs: typing.List[typing.Any]
    masks: typing.List[typing.Any]
    losses: typing.List[tf.Tensor]
    updates: typing.List[typing.Any]


class KerasTowers:
    """A Keras model that is called in towers: each call is a build without an optimizer.

    It is no layer itself: Keras takes up every layer that is an attribute of a layer, and would
    count the model twice.

    Attributes:
      model: the Keras model, whose weights all towers share.
      devices: the devices of the towers.
      builds: the `BuiltTowers` of each call; first of the call on the model's own inputs.
      updates: list of `(layer, operation)`: the updates of the layers' state in the first tower of
        every build.
    """

    def __init__(self, model: typing.Any, devices: Devices):
        self.model = model
        self.devices = devices
        self.builds: typing.List[BuiltTowers] = []
        self.updates: typing.List[typing.Tuple[typing.Any, tf.Operation]] = []

    def call(self, inputs: list, masks: list, training: typing.Any) -> Called:
        """Calls the model in every tower on its shard of the batch.

        Args:
          inputs: tensors [batch, …], in the order of the model's inputs.
          masks: for each input its mask, or None.
          training: as Keras gives it to `call`: a bool, a tensor, or None.

        Returns:
          `Called`, for the whole batch.
        """
        records: typing.List[typing.Any] = []

        def call_model(inputs: list, masks: list) -> dict:
            """Calls the Keras model in one tower, on its shard.

            In Keras every output has a row for each example: `RowsOfExamples` says so, where the
            build cannot prove it. The logits are returned, too, because Keras' cross entropies take
            these in the place of probabilities.
            """
            with record_keras_calls() as record, compat.autograph_of_layers():
                outputs = _call(self.model, inputs, masks, training)
            records.append(record)
            rows = _batch_size(inputs[0])
            return {'predictions': RowsOfExamples({
                'outputs': [_with_batch_dimension(output, rows) for output in outputs],
                'logits': list(map(_logits, outputs)),
                'masks': list(map(compat.keras_mask, outputs))})}

        # With 'reuse' the model is called for each tower, and not copied: Keras takes the gradients
        # later, through all towers, and TensorFlow cannot differentiate the copy of a loop. The
        # name scope tells the towers' operations from others:
        # `parallel_model_towers/copies/tower_1/…`.
        with tf.name_scope('copies'):
            built = build_towers(call_model, (inputs, masks), optimizer=None, devices=self.devices,
                                 reduction='mean', remainder='weight', copies='reuse')
            with only_device('/device:CPU:0'):
                outputs = _merged_outputs(built)
                losses = _mean_losses(records, built)
        updates_of_layers = records[0].updates_of_layers()  # the state of layers is tower 0's
        self.builds.append(built)
        self.updates.extend(updates_of_layers)
        operations_of_layers = [op for _, op in updates_of_layers]
        updates = _each_once(operations_of_layers, built.towers[0].updates)
        return Called(outputs, built.predictions.rows['masks'], losses, updates)


def _each_once(updates_of_layers: typing.List[tf.Operation],
               updates_of_tower: typing.Iterable[typing.Any]) -> typing.List[typing.Any]:
    """The updates of the first tower, each once.

    Args:
      updates_of_layers: the updates that Keras layers have, also of frozen layers.
      updates_of_tower: the updates that the build has found: of layers that are not frozen, and in
        the collection `UPDATE_OPS`, where `tf.layers` within the model put them.
    """
    updates: typing.List[typing.Any] = list(updates_of_layers)
    names_of_updates = names_of(updates_of_layers)
    for update in updates_of_tower:
        if operation_of(update).name not in names_of_updates:
            updates.append(update)
    return updates


def _merged_outputs(built: BuiltTowers) -> typing.List[typing.Any]:
    """The outputs of the whole batch, with their logits where Keras looks for them."""
    merged = built.predictions.rows
    outputs_of_first = built.towers[0].predictions.rows['outputs']
    outputs = []
    for output, logits, first_output in zip(merged['outputs'], merged['logits'], outputs_of_first):
        outputs.append(_with_logits(output, logits, first_output))
    return outputs


def _mean_losses(records: typing.List[typing.Any], built: BuiltTowers) -> typing.List[tf.Tensor]:
    """The losses that layers add, each as the mean over the towers, weighted by their examples.

    Args:
      records: what `record_keras_calls` has recorded in each tower.
      built: the towers.
    """
    sizes = [tower.size for tower in built.towers]
    num_examples = tf.cast(sum(sizes), tf.float64)
    weights = [tf.cast(size, tf.float64) / num_examples for size in sizes]
    # By default losses that depend on a `keras.Input` are left out, since nobody feeds it. Here
    # they count: a `ParallelModel` is built by a call on such inputs, which Keras later feeds.
    losses_of_towers = [record.activity_losses(on_keras_input=True) for record in records]
    means = []
    for terms in zip(*losses_of_towers):  # the values of one loss in all towers
        means.append(weighted_sum(terms, weights))
    return means


def _call(model: typing.Any, inputs: list, masks: list, training: typing.Any) -> list:
    """Calls a Keras model.

    Args:
      model: the Keras model.
      inputs, masks: the arguments of `KerasTowers.call`, cut for one tower.
      training: as Keras gives it to `call`.

    Returns:
      The outputs as a list in the order of `model.outputs`, also where the model returns a dict.
    """
    arguments: typing.Dict[str, typing.Any] = {}
    if training is not None:
        arguments['training'] = training
    if any(mask is not None for mask in masks):
        arguments['mask'] = one_or_list(masks)
    return tf.nest.flatten(model(one_or_list(inputs), **arguments))


def one_or_list(values: list) -> typing.Any:
    """The list as Keras gives and takes it: a list of one value as that value."""
    return values[0] if len(values) == 1 else values


# The types of a model's last operation whose input, the logits, Keras' cross entropies take in the
# place of the output: a loss of the output would have no gradient where a probability has become 0
# or 1. Keras looks for the logits at the output tensor and, on TF 1.15 always, at its operation.
_ACTIVATIONS = {'Sigmoid': tf.sigmoid, 'Softmax': tf.nn.softmax}


def _logits(output: typing.Any) -> typing.Optional[tf.Tensor]:
    """The logits that Keras' cross entropies take in the place of an output [rows, …]; None for an
    output without logits.

    A scalar output has none: its logits would be a scalar, too, where `_with_batch_dimension` makes
    the output [rows, 1].
    """
    is_dense = isinstance(output, tf.Tensor)
    if not is_dense or output.shape.ndims == 0:
        return None
    logits = compat.keras_logits(output)
    if logits is None and output.op.type in _ACTIVATIONS:
        logits = output.op.inputs[0]
    return logits


def _with_logits(output: typing.Any, logits: typing.Any, first_output: typing.Any) -> typing.Any:
    """A merged output that has its logits where Keras looks for them.

    Args:
      output: the output of the whole batch.
      logits: the logits of the whole batch; None for an output without logits.
      first_output: the output of the first tower, which has its logits at the tensor or at its
        operation.
    """
    if logits is None:
        return output
    has_logits_at_tensor = compat.keras_logits(first_output) is not None
    if not has_logits_at_tensor:
        # Keras finds logits as the input of a sigmoid or a softmax. The merged output is a
        # concatenation, so the activation is computed once more, of the merged logits.
        return _ACTIVATIONS[first_output.op.type](logits)
    compat.set_keras_logits(output, logits)
    return output


def _batch_size(tensor: tf.Tensor) -> typing.Any:
    """The size of the first dimension: an int where it is static, else a scalar."""
    static_size = tensor.shape.as_list()[0]
    if static_size is None:
        return tf.shape(tensor)[0]
    return static_size


def _with_batch_dimension(output: typing.Any, rows: typing.Any) -> typing.Any:
    """A scalar output as [rows, 1], the same for each example; another output as it is.

    So the mean of a scalar over the batch is weighted by the towers' examples.
    """
    if isinstance(output, tf.Tensor) and output.shape.ndims == 0:
        return tf.fill([rows, 1], output)
    return output


def device_of_gradient(op: tf.Operation) -> str:
    """The device of a new operation, in code that takes gradients through several towers.

    It is given to `tf.device`, which calls it with each operation. Keras' optimizers take the
    gradient of one loss through all towers of a model, and name no device. With this function an
    operation that computes a gradient is on the device of the operation whose gradient it computes.
    An operation that computes no single operation's gradient gets '' (TensorFlow chooses a device):
    the sum over the towers for a weight, or a counter of a loop.
    """
    if op.device:
        return op.device
    forward = compat.differentiated_operation(op)
    if forward is None:
        return ''
    return forward.device
