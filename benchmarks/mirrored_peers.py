"""Contenders by `MirroredStrategy`: in a graph, and as TF2's `tf.function`.

Both train the same model functions. `compute_gradients` and `tf.gradients` know nothing of the
strategy, so the loss is divided by the number of replicas here and the gradients are summed.
"""

import tensorflow.compat.v1 as tf
from tensorflow.compat.v2 import Variable

from benchmarks import workloads
from benchmarks.graph_peers import plain_config
from benchmarks.programs import TRACED, GraphParts, copies_of
from benchmarks.workloads import initial_value


def build_mirrored_graph(workload, arrays, num_towers, threads=None):
    """`MirroredStrategy` under `compat.v1` graph mode; returns `GraphParts`."""
    strategy = tf.distribute.MirroredStrategy(_devices(num_towers))
    with strategy.scope():
        optimizer = workloads.optimizer(workload.learning_rate)
        iterator = strategy.make_dataset_iterator(_batches(arrays))

        def replica(shard):
            loss = workload.model(*shard)
            return loss, optimizer.apply_gradients(
                optimizer.compute_gradients(loss * (1. / num_towers)))

        losses, trained = run_on_replicas(strategy)(replica, args=(iterator.get_next(),))
        loss = strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        train_op = tf.group(*[part for each in [trained] + updates
                              for part in strategy.experimental_local_results(each)])
        weights = {copies_of(variable)[0].op.name: copies_of(variable)
                   for variable in tf.global_variables()
                   if '/Momentum' not in copies_of(variable)[0].op.name}
        return GraphParts(loss, train_op, weights, [iterator.initialize()],
                          plain_config(num_towers, threads or 0))


class FunctionProgram:
    """`MirroredStrategy` around a `tf.function`, in a process with TF2's behaviour."""

    def __init__(self, workload, arrays, num_towers, threads=None):
        if threads:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
        cpu = tf.config.experimental.list_physical_devices('CPU')[0]
        tf.config.experimental.set_virtual_device_configuration(
            cpu, [tf.config.experimental.VirtualDeviceConfiguration() for _ in range(num_towers)])
        self._strategy = tf.distribute.MirroredStrategy(_devices(num_towers))
        made = _variables_of(workload.model, arrays)
        with self._strategy.scope():
            self._variables = {
                name: Variable(initial_value(name, shape), trainable=trainable, name=name,
                               synchronization=_synchronization(trainable),
                               aggregation=tf.VariableAggregation.MEAN)
                for name, shape, trainable in made}
            optimizer = workloads.optimizer(workload.learning_rate)
        self._trainable = [name for name, _, trainable in made if trainable]
        batches = iter(self._strategy.experimental_distribute_dataset(_batches(arrays)))

        def replica(*shard):
            shard = shard[0] if len(shard) == 1 else shard  # 1.15 passes the tuple as it is
            weights = [self._variables[name] for name in self._trainable]
            # What the model's get_variable finds is what was made in the strategy's scope.
            with tf.variable_scope(tf.get_variable_scope(), custom_getter=self._look_up):
                loss = workload.model(*shard)
            gradients = tf.gradients(loss * (1. / num_towers), weights)
            optimizer.apply_gradients(list(zip(gradients, weights)))
            return loss

        @tf.function(autograph=False)  # the models have no Python control flow to convert
        def step():
            losses = run_on_replicas(self._strategy)(replica, args=(next(batches),))
            return self._strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)

        self._function = step

    def _look_up(self, getter, name, *args, **kwargs):
        del getter, args, kwargs
        return self._variables[name]

    def step(self):
        """One training step; the loss before it, a float."""
        return float(self._function())

    def trainable_weights(self):
        """Yields (name, array) of the first copy of each trainable weight."""
        for name in self._trainable:
            yield name, copies_of(self._variables[name])[0].numpy()

    def peak_bytes(self):
        """Most bytes that TensorFlow's CPU allocator held during a step; None where it is not told.
        """
        experimental = tf.config.experimental
        if not hasattr(experimental, 'get_memory_info'):
            return None
        experimental.reset_memory_stats('CPU:0')
        for _ in range(TRACED):
            self.step()
        return experimental.get_memory_info('CPU:0')['peak']

    def close(self):
        """Nothing is held but the process."""


def _devices(num_towers):
    return ['/cpu:%d' % index for index in range(num_towers)]


def _batches(arrays):
    # The strategy cuts the batch for its replicas by itself, and prefetches.
    return tf.data.Dataset.from_tensor_slices(arrays).batch(
        len(arrays[0]), drop_remainder=True).cache().repeat()


def _synchronization(trainable):
    """How copies of a variable are kept equal.

    On TF 1.15 slim's batch norm is the Keras layer, whose statistics each replica keeps for itself
    (it cannot update mirrored ones); later slim's own averages them over the replicas.
    """
    if not trainable and tf.version.VERSION.startswith('1.'):
        return tf.VariableSynchronization.ON_READ
    return tf.VariableSynchronization.AUTO


def run_on_replicas(strategy):
    """The method that runs a function on every replica, under its name of this version."""
    return getattr(strategy, 'run', None) or strategy.experimental_run_v2


def _variables_of(model, arrays):
    """[(name, shape, trainable)] of the variables that a model makes, from a graph of its own."""
    with tf.Graph().as_default():
        model(*[tf.placeholder(array.dtype, array.shape) for array in arrays])
        return [(variable.op.name, variable.get_shape().as_list(), variable.trainable)
                for variable in tf.global_variables()]
