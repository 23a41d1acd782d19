"""Contenders of other makers for `benchmarks.cluster`: `MultiWorkerMirroredStrategy`, Horovod.

Each process has one replica, the same number of threads for an operation's work, and the same model
function. All processes have to make the same number of steps, so they agree on one after the
warm-up.
"""

import time
import typing

import tensorflow.compat.v1 as tf

RATE = 0.01


def mirrored(model_fn, arrays, chunk, threads):
    """`MultiWorkerMirroredStrategy` around a `tf.function`, in a process with TF2's behaviour.

    Args:
      model_fn: function of the batch that returns a loss; its variables come from `get_variable`.
      arrays: function without arguments that makes the batch of this process, a tuple of tensors.
      chunk: number of steps in one call.
      threads: number of threads for one operation's work.

    Returns:
      `(run, mean)`: a function that makes `chunk` steps, and one that gives the mean of a float
      over all processes.
    """
    from tensorflow.compat.v2 import Variable
    tf.enable_v2_behavior()
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    distribute = tf.distribute if hasattr(tf.distribute, 'MultiWorkerMirroredStrategy') else (
        tf.distribute.experimental)
    strategy = distribute.MultiWorkerMirroredStrategy()
    run_on_replicas = getattr(strategy, 'run', None) or strategy.experimental_run_v2
    with tf.Graph().as_default():
        model_fn(*arrays())
        made = [(each.op.name, each.get_shape().as_list()) for each in tf.global_variables()]
        trained = [each.op.name for each in tf.trainable_variables()]
    with strategy.scope():
        variables = {name: Variable(
            tf.random.stateless_uniform(shape, [1, 2], -0.05, 0.05), name in trained, name=name,
            aggregation=tf.VariableAggregation.NONE if name in trained
            else tf.VariableAggregation.ONLY_FIRST_REPLICA) for name, shape in made}
        optimizer = tf.train.GradientDescentOptimizer(RATE)
    weights = [variables[name] for name in trained]

    def replica():
        # What the model's get_variable finds is what was made in the strategy's scope.
        with tf.variable_scope(tf.get_variable_scope(), custom_getter=lambda getter, name, *args,
                               **options: variables[name]):
            loss = model_fn(*arrays())
        gradients = tf.gradients(loss / strategy.num_replicas_in_sync, weights)
        optimizer.apply_gradients(list(zip(gradients, weights)))

    @tf.function(autograph=False)
    def step():
        run_on_replicas(replica)

    @tf.function(autograph=False)
    def sum_of(number):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, run_on_replicas(
            lambda: tf.constant(number, tf.float64)), axis=None)

    def run():
        for _ in range(chunk):
            step()
        weights[0].read_value().numpy()  # the steps run in the order in which they were called
    return run, lambda number: float(sum_of(number)) / strategy.num_replicas_in_sync


def horovod(model_fn, arrays, chunk, threads):
    """`hvd.DistributedOptimizer` in a plain loop; arguments and return as `mirrored`."""
    import horovod.tensorflow as hvd
    parts = _by_horovod(hvd, model_fn, arrays, threads)
    start = hvd.broadcast_global_variables(0)
    session = tf.Session(config=parts.config)
    session.run(tf.global_variables_initializer())
    session.run(start)
    step = session.make_callable(parts.train_op)

    def run():
        for _ in range(chunk):
            step()
    return run, lambda value: float(session.run(parts.mean, {parts.number: value}))


def horovod_session(model_fn, arrays, chunk, threads):
    """The same in the loop of Horovod's own examples: a `MonitoredTrainingSession` that counts the
    steps, with the hooks that give all processes the first weights and end the training."""
    import horovod.tensorflow as hvd
    parts = _by_horovod(hvd, model_fn, arrays, threads)
    hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=10**9)]
    session = tf.train.MonitoredTrainingSession(config=parts.config, hooks=hooks)

    def run():
        for _ in range(chunk):
            if not session.should_stop():
                session.run(parts.train_op)

    def mean(value):
        return float(session.run_step_fn(
            lambda step_context: step_context.session.run(parts.mean, {parts.number: value})))
    return run, mean


class _ByHorovod(typing.NamedTuple):
    """What both loops with Horovod's optimizer run."""
    train_op: tf.Operation
    number: tf.Tensor  # a placeholder, float64 scalar
    mean: tf.Tensor  # of `number` over all processes
    config: tf.ConfigProto


def _by_horovod(hvd, model_fn, arrays, threads):
    """Makes the graph of both loops: `_ByHorovod`."""
    hvd.init()
    tf.disable_v2_behavior()
    # All sessions of a process share the threads that are made first. A saver makes them, as a
    # `MonitoredTrainingSession` has one, and it does not know the session's config.
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(RATE))
    train_op = optimizer.minimize(
        model_fn(*arrays()), global_step=tf.train.get_or_create_global_step())
    number = tf.placeholder(tf.float64, [])
    return _ByHorovod(train_op, number, mean=hvd.allreduce(number, op=hvd.Average),
                      config=tf.ConfigProto(intra_op_parallelism_threads=threads))


def timed(run, mean, seconds, chunk):
    """`(steps, seconds, seconds of this process's processors)` of calls of `run`: as many as fit in
    about that time, on all processes."""
    run()
    begin = time.perf_counter()
    run()
    calls = max(1, round(seconds / mean(time.perf_counter() - begin)))
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(calls):
        run()
    return calls * chunk, time.perf_counter() - begin, time.process_time() - used
