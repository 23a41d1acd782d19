"""Large dense gradients that go as tensors: several servers in one process, and one device."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from towers import compat
from towers.cluster import tensor_exchange
from towers.errors import WorkerLostError
from towers.graph.graph_walk import step_operations
from towers.report import trace
from towers.report.parts import StepParts
from machine_samples import batches, close, on_one_device, sparse_and_dense
from one_process import addresses, together, train


def is_sent_or_received(op):
    return op.type.strip('_') in ('Send', 'Recv')


@pytest.mark.parametrize('sizes, wire, buffer_mb', first_fast(1, [
    ([5, 3, 1], None, 8. / 2 ** 20), ([5, 2], None, 4.), ([4, 2, 1, 3], None, 4.),
    ([5, 3, 1], 'float16', 4.)]))
def test_gradients_that_go_as_tensors_are_those_of_one_device(sizes, wire, buffer_mb, monkeypatch):
    """The same bits on all workers, in several steps."""
    monkeypatch.setattr(tensor_exchange, 'LEAST_BYTES', 1)
    parts, workers = batches(sizes), addresses(len(sizes))
    results = together(lambda rank: train(
        towers.Cluster('ring', workers, rank=rank, uneven=True, wire=wire, buffer_mb=buffer_mb),
        sparse_and_dense, parts[rank], lambda: tf.train.GradientDescentOptimizer(0.125), 3),
        len(sizes))
    if wire is None:
        gradients, weights = on_one_device(parts, results[0]['first'], 3, 1)
        close(gradients, results[0]['gradients'])
        close(weights, results[0]['last'])
    else:
        gradients, _ = on_one_device(parts, results[0]['first'], 1, 1)
        for name, value in gradients.items():
            np.testing.assert_allclose(results[0]['gradients'][name], value, 2e-3, 2e-3)
    for other in results[1:]:
        for kind in ('gradients', 'last'):
            for name, value in results[0][kind].items():
                assert value.tobytes() == other[kind][name].tobytes(), name


@pytest.mark.parametrize('wire', first_fast(1, [None, 'bfloat16']))
def test_the_last_message_waits_for_all_tensors(wire, monkeypatch):
    """Else a worker might end its step, and drop what another worker has still to receive."""
    monkeypatch.setattr(tensor_exchange, 'LEAST_BYTES', 20)
    rows, targets = batches([4])[0]
    built = towers.build_towers(
        sparse_and_dense, (tf.constant(rows), tf.constant(targets)),
        tf.train.GradientDescentOptimizer(0.1), 2, 'mean', remainder='weight',
        cluster=towers.Cluster('ring', ['127.0.0.1:1', '127.0.0.1:2', '127.0.0.1:3'], uneven=True,
                               wire=wire, buffer_mb=16. / 2 ** 20))
    step = step_operations([built.train_op])
    tensors = [op for op in step if is_sent_or_received(op)]
    assert tensors
    reductions = [op for op in step if op.type == 'CollectiveReduce']
    names = [{each.name for each in step_operations([reduction])} for reduction in reductions]
    assert any(before.issuperset(op.name for op in tensors) for before in names)
    for op in tensors:  # none before the message with the numbers of examples
        before = step_operations([op])
        assert any(each.type == 'CollectiveReduce' for each in before)


def test_no_tensor_is_sent_in_a_session_that_has_not_begun():
    """Each waits for the operation that fails there, although the gradient does not need it."""
    built = towers.build_towers(
        large, tf.ones([4]), tf.train.GradientDescentOptimizer(0.1), 1, 'mean',
        cluster=towers.Cluster('ring', ['127.0.0.1:1', '127.0.0.1:2']))
    sent = [op for op in step_operations([built.train_op]) if op.type.strip('_') == 'Send']
    assert sent
    for op in sent:
        awaited = [each for each in op.control_inputs if each.type == 'Identity']
        assert any('begun' in each.name for each in step_operations(awaited))


def large(x):
    """A loss with gradients of 1.2 MB; each number of the gradient is the mean of the inputs."""
    weights = tf.get_variable('weights', [300, 1000], initializer=tf.zeros_initializer())
    return tf.reduce_mean(x) * tf.reduce_sum(weights)


def test_a_traced_step_shows_the_tensors_as_copies():
    """And its messages once each. The sum over the workers is exact."""
    workers, names, received = addresses(2), [], []

    def work(rank):
        with tf.Graph().as_default():
            cluster = towers.Cluster('ring', workers, rank=rank)
            built = towers.build_towers(large, tf.constant([1. + rank]),
                                        tf.train.GradientDescentOptimizer(1.), 1, 'mean',
                                        cluster=cluster)
            metadata = tf.RunMetadata()
            with towers.join(cluster, built, start_timeout=30., dead_after=20.) as member, \
                    member.session() as session:
                for _ in range(2):
                    session.run(built.train_op, run_metadata=metadata, options=tf.RunOptions(
                        trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True))
                value = session.run_step_fn(
                    lambda step_context: step_context.session.run(built.variables[0]))
            if rank == 0:
                traced = trace.read_trace(metadata, StepParts(built))
                names.extend(operation.name for operation in traced.operations)
                received.extend(copy.row for copy in traced.copies)
            return value
    for value in together(work, 2):
        np.testing.assert_array_equal(value, np.full([300, 1000], -3., np.float32))
    if compat.TF_VERSION >= (2, 0):  # 1.15 traces no operation that receives from another process
        assert len(received) == 1 and '/task:1' in received[0].partition(' to ')[0], received
    assert names and not [name for name in names if name.startswith('Recv')], names


def test_a_worker_whose_step_another_ones_error_has_ended_names_that_one():
    """The tensor that it waits for brings it the other worker's error, which is not its own."""
    workers, errors = addresses(2), {}

    def work(rank):
        calls = []

        def fail_later():
            calls.append(None)
            if rank == 1 and len(calls) == 2:
                time.sleep(1.)  # worker 0 waits for the tensor
                raise ValueError('0007.jpg is bad')
            return np.float32(1.)
        with tf.Graph().as_default():
            cluster = towers.Cluster('ring', workers, rank=rank)
            one = tf.py_func(fail_later, [], tf.float32)
            one.set_shape([])
            built = towers.build_towers(large, tf.ones([1]) * one,
                                        tf.train.GradientDescentOptimizer(1.), 1, 'mean',
                                        cluster=cluster)
            try:
                with towers.join(cluster, built, start_timeout=30., dead_after=20.,
                                 on_lost=lambda error: None) as member, \
                        member.session() as session:
                    for _ in range(3):
                        session.run(built.train_op)
            except (tf.errors.OpError, WorkerLostError) as error:
                errors[rank] = error
    together(work, 2)
    assert isinstance(errors[1], tf.errors.InvalidArgumentError), errors
    assert isinstance(errors[0], WorkerLostError), errors
    assert 'worker 1 (' in str(errors[0]) and '0007.jpg is bad' in str(errors[0]), errors
