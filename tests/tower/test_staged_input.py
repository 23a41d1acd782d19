"""Staged inputs: step t trains on batch t, from the tower's own device, also after a restart."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.run.input_watch import InputWatch

DEVICES = ['/cpu:1', '/cpu:2']


def config():
    return tf.ConfigProto(device_count={'CPU': 3})


class Program:
    """A legacy program: numbers of a `tf.data` iterator, and a weight that tells their order."""

    def __init__(self, dataset, stage_inputs=True, devices=DEVICES, between=None, **options):
        self.iterator = tf.data.make_initializable_iterator(dataset)
        inputs = self.iterator.get_next()
        if between is not None:
            inputs = between(inputs)
        self.seen = []

        def model_fn(*parts):
            weight = tf.get_variable('weight', [], tf.float64, tf.ones_initializer())
            numbers = tf.cast(parts[0], tf.float64)
            # Not linear: another order of the batches gives another weight.
            loss = tf.reduce_mean(tf.square(weight - numbers / 10) * (1 + tf.square(weight)))
            return towers.ModelOutput(loss, predictions=parts[0])
        self.built = towers.build_towers(
            model_fn, inputs, tf.train.GradientDescentOptimizer(0.05), devices, 'mean',
            stage_inputs=stage_inputs, **options)

    def session(self):
        session = tf.Session(config=config())
        session.run([tf.global_variables_initializer(), self.iterator.initializer])
        return session

    def steps(self, session, count=None):
        """[what a step was trained on], up to the end of the data."""
        found = []
        while count is None or len(found) < count:
            try:
                _, numbers = session.run([self.built.train_op, self.built.predictions])
            except tf.errors.OutOfRangeError:
                break
            found.append(numbers.tolist())
        return found

    def weight(self, session):
        return session.run(self.built.variables[0])


def batches(count=5, size=4):
    return tf.data.Dataset.range(count * size).batch(size, drop_remainder=True)


EXPECTED = [list(range(4 * k, 4 * k + 4)) for k in range(5)]


def trained(stage_inputs, dataset, **options):
    with tf.Graph().as_default():
        program = Program(dataset(), stage_inputs, **options)
        with program.session() as session:
            return program.steps(session), program.weight(session)


def test_step_t_reads_batch_t_to_the_last_and_trains_as_without():
    plain, weight = trained(False, batches)
    staged, staged_weight = trained(True, batches)
    assert plain == staged == EXPECTED
    assert weight == staged_weight


def test_one_tower_a_batch_and_no_batch_at_all():
    assert trained(True, batches, devices=['/cpu:1'])[0] == EXPECTED
    assert trained(True, lambda: batches(1))[0] == EXPECTED[:1]
    assert trained(True, lambda: batches().take(0)) == ([], 1.)


def test_clones_and_calls_are_the_same():
    assert trained(True, batches, copies='clone') == trained(True, batches, copies='reuse')


def test_after_the_end_nothing_is_trained_and_an_epoch_can_begin():
    program = Program(batches())
    with program.session() as session:
        assert program.steps(session) == EXPECTED
        weight = program.weight(session)
        assert program.steps(session) == [] and program.weight(session) == weight
        session.run(program.iterator.initializer)
        assert program.steps(session) == EXPECTED


def test_an_initializer_in_the_middle_begins_anew():
    program = Program(batches())
    with program.session() as session:
        program.steps(session, 2)
        session.run(program.iterator.initializer)
        assert program.steps(session) == EXPECTED


def test_a_run_of_something_else_takes_one_batch_of_all_towers():
    program = Program(batches())
    with program.session() as session:
        assert program.steps(session, 2) == EXPECTED[:2]
        # Staged by the step before; the run of one tower's part takes it from both.
        tower = program.built.towers[1]
        assert session.run(tower.predictions).tolist() == EXPECTED[2][2:]
        assert session.run(program.built.predictions).tolist() == EXPECTED[3]
        assert program.steps(session) == EXPECTED[4:]


def test_a_run_of_one_tower_that_reads_ahead_takes_the_batch_of_all_towers():
    program = Program(batches())
    ahead = program.built.staged.staged
    with program.session() as session:
        assert session.run([program.built.towers[0].predictions, ahead])[0].tolist() == [0, 1]
        assert program.steps(session) == EXPECTED[1:]


def test_a_shard_that_is_missing_from_one_buffer_brings_no_other_into_the_batch():
    """As after a step that broke off: what is left of that batch is given up, in all buffers."""
    program = Program(batches(), copies='reuse')
    with program.session() as session:
        assert program.steps(session, 1) == EXPECTED[:1]
        graph = tf.get_default_graph()
        take, = [op for op in graph.get_operations()
                 if op.type == 'Unstage' and op.device == '/device:CPU:1']
        session.run(take)
        assert program.steps(session) == EXPECTED[2:]


def test_two_sessions_have_buffers_of_their_own():
    program = Program(batches())
    with program.session() as one, program.session() as other:
        assert program.steps(one, 2) == EXPECTED[:2]
        assert program.steps(other, 3) == EXPECTED[:3]
        assert program.steps(one) == EXPECTED[2:]


def test_shards_are_staged_on_their_towers_while_they_work(graph):
    program = Program(batches())
    staged = {op.device for op in graph.get_operations() if op.type == 'Stage'}
    assert staged == {'/device:CPU:1', '/device:CPU:2'}
    for tower, device in zip(program.built.towers, DEVICES):
        assert tf.DeviceSpec.from_string(
            tf.nest.flatten(tower.inputs)[0].op.device).device_index == int(device[-1])
    with program.session() as session:
        metadata = tf.RunMetadata()
        program.steps(session, 1)
        session.run(program.built.train_op, options=tf.RunOptions(
            trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
        ran = {}
        for device in metadata.step_stats.dev_stats:
            for node in device.node_stats:
                ran.setdefault(node.node_name.split('/')[-1].split(':')[0], set()).update(
                    re.findall(r'CPU:(\d)$', device.device))
        # The towers take their shard from their own device; nothing is primed any more.
        assert ran['Unstage'] | ran.get('Unstage_1', set()) == {'1', '2'}
        assert not any(name.startswith('first') for name in ran)
        # When a step is over the next batch is there.
        sizes = [graph.get_operation_by_name(op.name).outputs[0] for op in graph.get_operations()
                 if op.type == 'StageSize']
        assert session.run(sizes) == [1, 1]
    assert towers.audit(program.built).raise_if_broken()
    assert "the next batch is put on the towers' devices" in str(program.built.plan)


def test_a_run_that_resumes_reads_what_was_staged_and_not_trained_on(tmp_path):
    """As train.py: the place in the data is a variable, and the iterator starts there."""
    def run(stop):
        with tf.Graph().as_default():
            step = tf.train.get_or_create_global_step()
            dataset = batches().skip(tf.identity(step))
            program = Program(dataset, global_step=step)

            class Start(tf.train.SessionRunHook):
                def after_create_session(self, session, coord):
                    session.run(program.iterator.initializer)
            saver = tf.train.CheckpointSaverHook(str(tmp_path), save_steps=1)
            creator = tf.train.ChiefSessionCreator(config=config(), checkpoint_dir=str(tmp_path))
            found = []
            with tf.train.MonitoredSession(creator, [Start(), saver]) as session:
                try:
                    while len(found) < stop:
                        found.append(session.run([program.built.train_op,
                                                  program.built.predictions])[1].tolist())
                except tf.errors.OutOfRangeError:
                    pass
            return found
    assert run(2) == EXPECTED[:2]
    assert run(9) == EXPECTED[2:]


def test_what_is_between_the_iterator_and_the_towers_is_copied():
    def between(numbers):
        with tf.control_dependencies([tf.assert_non_negative(numbers)]):
            offset = tf.constant(3, tf.int64)
            odd = tf.cond(tf.reduce_sum(numbers) < 30, lambda: numbers + offset,
                          lambda: numbers - offset)
            return tf.reshape(odd, [-1])
    plain = trained(False, batches, between=between)
    assert trained(True, batches, between=between) == plain
    assert plain[0][0] == [3, 4, 5, 6] and plain[0][4] == [13, 14, 15, 16]


def test_uneven_batches_of_unknown_size_are_weighted():
    def dataset():
        return tf.data.Dataset.range(10).batch(3)
    plain = trained(False, dataset, remainder='weight')
    staged = trained(True, dataset, remainder='weight')
    assert staged == plain
    assert [len(numbers) for numbers in plain[0]] == [3, 3, 3, 1]


def test_dicts_strings_and_sparse_tensors():
    def parse(number):
        return {'number': number, 'name': tf.as_string(number), 'sparse': tf.SparseTensor(
            tf.zeros([1, 1], tf.int64), tf.reshape(number, [1]), [5])}

    shapes = []

    def seen(stage_inputs):
        with tf.Graph().as_default():
            dataset = tf.data.Dataset.range(12).map(parse).batch(4, drop_remainder=True)
            iterator = tf.data.make_initializable_iterator(dataset)

            def model_fn(inputs):
                weight = tf.get_variable('weight', [], tf.float32, tf.ones_initializer())
                shapes.append(inputs['sparse'].shape.as_list())
                dense = tf.sparse.to_dense(inputs['sparse'])
                return towers.ModelOutput(
                    weight * tf.reduce_mean(tf.cast(dense, tf.float32)),
                    predictions=(inputs['name'], dense))
            built = towers.build_towers(model_fn, iterator.get_next(),
                                        tf.train.GradientDescentOptimizer(0.1), DEVICES,
                                        stage_inputs=stage_inputs)
            with tf.Session(config=config()) as session:
                session.run([tf.global_variables_initializer(), iterator.initializer])
                return [session.run([built.train_op, built.predictions])[1] for _ in range(3)]
    for plain, staged in zip(seen(False), seen(True)):
        assert shapes[0] == shapes[-1]
        np.testing.assert_array_equal(plain[0], staged[0])
        np.testing.assert_array_equal(plain[1], staged[1])


def test_the_first_batch_over_and_over():
    program = Program(batches(), 'first')
    with program.session() as session:
        assert program.steps(session, 7) == EXPECTED[:1] * 7
        watch = InputWatch(program.built.train_op, program.built.staged)
        session.run(watch.initializer)
    with program.session() as session:
        session.run(watch.initializer)
        program.steps(session, 3)
        assert watch.span(watch.read(session)).waited == 0


def test_the_watch_counts_what_the_towers_wait_for():
    import time

    def slow(number):
        time.sleep(0.05)
        return number
    dataset = batches().map(lambda numbers: tf.ensure_shape(
        tf.numpy_function(slow, [numbers], tf.int64), [4]))
    program = Program(dataset)
    watch = InputWatch(program.built.train_op, program.built.staged)
    with program.session() as session:
        session.run(watch.initializer)
        assert program.steps(session) == EXPECTED
        span = watch.span(watch.read(session))
    assert span.steps == 5 and watch.reads[0].endswith('next')
    assert 0.1 < span.waited <= span.seconds


@pytest.mark.parametrize('inputs, text', [
    (lambda: tf.zeros([4]), 'they come from no iterator'),
    (lambda: tf.placeholder(tf.float32, [4]), 'they come from no iterator'),
    (lambda: tf.FIFOQueue(3, tf.float32, []).dequeue_many(4), 'reads them by QueueDequeueMany'),
    (lambda: (one_shot(), tf.placeholder(tf.float32, [4])), "does not come from the iterator"),
    (lambda: tf.cast(one_shot(), tf.float32) + tf.random_uniform([4]), 'draws random numbers'),
    (lambda: tf.data.Iterator.from_string_handle(
        tf.placeholder(tf.string, []), tf.int64, [4]).get_next(), 'depends on what is fed'),
])
def test_inputs_that_cannot_be_read_ahead(inputs, text):
    with pytest.raises(towers.InputError, match=text):
        towers.build_towers(lambda *parts: 0., inputs(), tf.train.GradientDescentOptimizer(0.1),
                            DEVICES, stage_inputs=True)


def one_shot():
    return tf.data.make_one_shot_iterator(batches()).get_next()


def test_arguments():
    with pytest.raises(towers.InvalidArgumentError, match="expected True, False or 'first'"):
        towers.build_towers(lambda *parts: 0., one_shot(), None, DEVICES, stage_inputs='last')
    with pytest.raises(towers.InvalidArgumentError, match='needs an optimizer'):
        towers.build_towers(lambda *parts: 0., one_shot(), None, DEVICES, stage_inputs=True)
