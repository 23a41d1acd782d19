"""Staged inputs: step t trains on batch t, from the tower's own device, also after a restart."""

import re
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.run.input_watch import InputWatch
from towers.tower import staged_guard

DEVICES = ['/cpu:1', '/cpu:2']


def config():
    # Threads that sleep are busy: with two of them nothing would be read beside two towers.
    return tf.ConfigProto(device_count={'CPU': 3}, inter_op_parallelism_threads=8)


def trained_on(iterator):
    """Builds staged towers on an iterator of numbers: the function that makes a step in a session,
    and returns the batch that it trained on."""
    built = towers.build_towers(
        lambda numbers: towers.ModelOutput(
            tf.reduce_mean(tf.cast(numbers, tf.float32)) * tf.get_variable('w', []),
            predictions=numbers),
        iterator.get_next(), tf.train.GradientDescentOptimizer(0.1), DEVICES, stage_inputs=True)
    return lambda session: session.run([built.train_op, built.predictions])[1].tolist()


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
        own_threads = config()  # the first session of a process decides for all that have none
        own_threads.use_per_session_threads = True
        session = tf.Session(config=own_threads)
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


@pytest.mark.slow
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


@pytest.mark.parametrize('of_handle', [False, True])
def test_an_iterator_is_known_by_its_string_handle(of_handle):
    iterator = initializable()
    other = tf.data.Iterator.from_string_handle(iterator.string_handle(), tf.int64, [4])
    initializer = other.make_initializer(batches()) if of_handle else iterator.initializer
    seen = trained_on(other)
    with tf.Session(config=config()) as session:
        session.run([tf.global_variables_initializer(), iterator.initializer])
        assert [seen(session) for _ in range(2)] == EXPECTED[:2]
        session.run(initializer)
        assert [seen(session) for _ in range(5)] == EXPECTED


@pytest.mark.slow
def test_two_iterators_that_nobody_initializes_go_on_in_pairs():
    first, second = one_shot(), one_shot()
    built = towers.build_towers(
        lambda a, b: towers.ModelOutput(
            tf.reduce_mean(tf.cast(a, tf.float32)) * tf.get_variable('w', []),
            predictions=(a, b)),
        (first, second), tf.train.GradientDescentOptimizer(0.1), DEVICES, stage_inputs=True)
    with tf.Session(config=config()) as session:
        session.run(tf.global_variables_initializer())
        for expected in EXPECTED:
            found = session.run([built.train_op, built.predictions])[1]
            assert [each.tolist() for each in found] == [expected, expected]


@pytest.mark.slow
def test_a_run_of_something_else_takes_one_batch_of_all_towers():
    program = Program(batches())
    with program.session() as session:
        assert program.steps(session, 2) == EXPECTED[:2]
        # Staged by the step before; the run of one tower's part takes it from both.
        tower = program.built.towers[1]
        assert session.run(tower.predictions).tolist() == EXPECTED[2][2:]
        assert session.run(program.built.predictions).tolist() == EXPECTED[3]
        assert program.steps(session) == EXPECTED[4:]


@pytest.mark.slow
def test_a_run_of_one_tower_that_reads_ahead_takes_the_batch_of_all_towers():
    program = Program(batches())
    ahead = program.built.staged.staged
    with program.session() as session:
        assert session.run([program.built.towers[0].predictions, ahead])[0].tolist() == [0, 1]
        assert program.steps(session) == EXPECTED[1:]


@pytest.mark.slow
def test_a_shard_that_is_missing_from_one_buffer_brings_no_other_into_the_batch():
    """As after a step that broke off: what is left of that batch is given up, in all buffers."""
    program = Program(batches(), copies='reuse')
    with program.session() as session:
        assert program.steps(session, 1) == EXPECTED[:1]
        graph = tf.get_default_graph()
        take, = [op for op in graph.get_operations()
                 if op.type == 'Unstage' and op.device == '/device:CPU:1'
                 and b'kept' not in op.get_attr('shared_name')]
        session.run(take)
        assert program.steps(session) == EXPECTED[2:]


def in_threads(*functions):
    """Calls functions at the same time; what each returns, or raises of TensorFlow's errors."""
    found = [None] * len(functions)

    def call(index):
        try:
            found[index] = functions[index]()
        except tf.errors.OpError as error:
            found[index] = error
    threads = [threading.Thread(target=call, args=(index,), daemon=True)
               for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


@pytest.mark.slow
def test_threads_that_step_at_the_same_time_train_on_each_batch_once():
    program = Program(batches(60))
    with program.session() as session:
        found = in_threads(*[lambda: program.steps(session)] * 3)
    assert sorted(sum(found, [])) == [list(range(4 * k, 4 * k + 4)) for k in range(60)]


@pytest.mark.slow
@pytest.mark.parametrize('fetched', ['loss', 'one shard'])
def test_a_thread_that_looks_at_a_batch_beside_the_loop_takes_it_whole(fetched):
    """As the thread for summaries does of `tf.train.Supervisor`, and of slim's training."""
    program = Program(batches(60))
    built, has_looked = program.built, threading.Event()

    def steps(session):
        assert has_looked.wait(60)  # else all may be trained on before the first look
        return program.steps(session)

    def looks(session):
        found = []
        with pytest.raises(tf.errors.OutOfRangeError):
            while True:
                found.append(session.run(
                    [built.loss, built.predictions] if fetched == 'loss' else
                    [built.towers[1].inputs] * 2)[1])
                has_looked.set()
                time.sleep(0.002)
        return found
    with program.session() as session:
        trained_on, looked_at = in_threads(lambda: steps(session), lambda: looks(session))
    assert looked_at
    firsts = [int(np.ravel(seen)[-1]) - 3 for seen in looked_at]
    if fetched == 'loss':
        assert [seen.tolist() for seen in looked_at] == [
            list(range(first, first + 4)) for first in firsts]
    assert [list(range(first, first + 4)) for first in sorted(firsts + [
        batch[0] for batch in trained_on])] == [list(range(4 * k, 4 * k + 4)) for k in range(60)]
    assert all(batch == list(range(batch[0], batch[0] + 4)) for batch in trained_on)


def held(session):
    """[(batches in a tower's buffer, batches kept)], tower by tower."""
    sizes = {}
    for op in tf.get_default_graph().get_operations():
        if op.type == 'StageSize' and op.device != '/device:CPU:0':  # there are the owners
            sizes[op.device, b'kept' in op.get_attr('shared_name')] = op.outputs[0]
    found = session.run(sizes)
    return [(found['/device:CPU:%d' % tower, False], found['/device:CPU:%d' % tower, True])
            for tower in (1, 2)]


class Powers:
    """A program that trains on 10 ** k for batch k = 1, 2, …: sums tell on which, each digit how
    often.

    A fast weight and one whose forward pass is slow; batch norm's way of updates, one of them in a
    loop and one in a branch; an optimizer that tells a Python program of its step.
    """

    def __init__(self, bad, count=6, read=0., work=0., bad_work=(), updates=True,
                 stage_inputs=True):
        def batch(number):
            number = slow(read, number)
            checks = [tf.raw_ops.Assert(condition=tf.not_equal(number, each), data=['bad batch'])
                      for each in bad]
            with tf.control_dependencies(checks):
                return tf.fill([4], 10. ** tf.cast(number, tf.float64))
        options = tf.data.Options()  # TensorFlow 2 would read ahead by itself
        options.experimental_optimization.apply_default_optimizations = False
        dataset = tf.data.Dataset.range(1, count + 1).map(batch).with_options(options)
        self.iterator = tf.data.make_initializable_iterator(dataset)
        self.step = tf.train.get_or_create_global_step()
        self.told = []
        # As in plain TensorFlow, updates do not wait for checks of the loss.
        self.counts = updates and not bad_work

        def note(gradient):
            self.told.append(float(gradient))
            return gradient

        class Tells(tf.train.GradientDescentOptimizer):
            def apply_gradients(self, pairs, *given, **named):
                applied = super(Tells, self).apply_gradients(pairs, *given, **named)
                return tf.group(applied, tf.numpy_function(note, [pairs[0][0]], tf.float64))

        def model_fn(numbers):
            zero = tf.zeros_initializer()
            fast, late = [tf.get_variable(name, [], tf.float64, zero) for name in ('fast', 'late')]
            counts = [tf.get_variable(name, [], tf.float64, zero, trainable=False)
                      for name in ('plain', 'looped', 'branched')]
            one = tf.sign(numbers[0])  # of the batch, as batch norm's updates are
            looped = tf.while_loop(lambda turn: turn < 1, lambda turn: after(
                tf.assign_add(counts[1], one), turn + 1), [0])
            branched = tf.cond(one > 0, lambda: tf.identity(tf.assign_add(counts[2], one)),
                               lambda: tf.zeros([], tf.float64))
            for update in (tf.assign_add(counts[0], one), looped, branched) if updates else ():
                tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
            later = tf.stop_gradient(slow(work, numbers))
            checks = [tf.raw_ops.Assert(condition=tf.reduce_all(tf.not_equal(later, 10. ** each)),
                                        data=['bad work']) for each in bad_work]
            with tf.control_dependencies(checks):
                return tf.reduce_mean(numbers) * fast + tf.reduce_mean(later) * late
        self.built = towers.build_towers(
            model_fn, self.iterator.get_next(), Tells(-1.), DEVICES, 'mean',
            global_step=self.step, stage_inputs=stage_inputs)

    def session(self):
        own_threads = config()  # the first session of a process decides for all that have none
        own_threads.use_per_session_threads = True
        session = tf.Session(config=own_threads)
        session.run([tf.global_variables_initializer(), self.iterator.initializer])
        return session

    def run(self, session):
        """(what became of one step, the batches that were trained on so far)."""
        try:
            session.run(self.built.train_op)
            ended = 'ok'
        except tf.errors.OutOfRangeError:
            ended = 'end'
        except tf.errors.InvalidArgumentError as error:
            ended = 'bad work' if 'bad work' in str(error) else 'bad batch'
            assert ('IteratorGetNext' in error.message) == (ended == 'bad batch')
        values = {variable.op.name: value for variable, value in zip(
            self.built.variables, session.run(self.built.variables))}
        total = int(values['fast'])
        trained = [k for k in range(1, 10) if total // 10 ** k % 10]
        assert total == sum(10 ** k for k in trained) == values['late'] == sum(self.told)
        assert len(trained) == session.run(self.step)
        if self.counts:
            assert values['plain'] == values['looped'] == values['branched'] == len(trained)
        return ended, trained


def slow(how, value):
    """The value, after a wait of `how` seconds, or when `how(value)` has returned."""
    if not how:
        return value

    def wait(number):
        how(number) if callable(how) else time.sleep(how)
        return number
    return tf.ensure_shape(tf.numpy_function(wait, [value], value.dtype), value.shape)


def after(operation, value):
    with tf.control_dependencies([operation]):
        return tf.identity(value)


def outcomes(steps, *given, **named):
    with tf.Graph().as_default():
        program = Powers(*given, **named)
        with program.session() as session:
            return [program.run(session) for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize('how', [
    dict(read=0.03), dict(work=0.03), dict(read=0.03, updates=False)], ids=str)
def test_a_batch_that_cannot_be_read_leaves_the_step_before_undone(how):
    plain = outcomes(7, [3], stage_inputs=False, **how)
    assert plain == [('ok', [1]), ('ok', [1, 2]), ('bad batch', [1, 2]), ('ok', [1, 2, 4]),
                     ('ok', [1, 2, 4, 5]), ('ok', [1, 2, 4, 5, 6]), ('end', [1, 2, 4, 5, 6])]
    assert outcomes(7, [3], **how) == [
        ('ok', [1]), ('bad batch', [1]), ('ok', [1, 2])] + plain[3:]


@pytest.mark.slow
def test_bad_batches_one_after_another_at_the_beginning_and_at_the_end():
    assert outcomes(7, [3, 4], count=5) == [
        ('ok', [1]), ('bad batch', [1]), ('ok', [1, 2]), ('bad batch', [1, 2]),
        ('ok', [1, 2, 5]), ('end', [1, 2, 5]), ('end', [1, 2, 5])]
    assert outcomes(5, [1, 3], count=3) == [
        ('bad batch', []), ('bad batch', []), ('ok', [2]), ('end', [2]), ('end', [2])]


@pytest.mark.slow
def test_work_that_fails_when_the_next_batch_is_there_costs_its_batch_alone():
    found = outcomes(7, [], count=5, work=1.5, bad_work=[3])
    again = found[3] == ('bad work', [1, 2])  # where other programs keep it from being there
    assert found[:3] == [('ok', [1]), ('ok', [1, 2]), ('bad work', [1, 2])]
    assert found[3 + again:6 + again] == [
        ('ok', [1, 2, 4]), ('ok', [1, 2, 4, 5]), ('end', [1, 2, 4, 5])]


@pytest.mark.slow  # the reading has to take longer than the failure
def test_work_that_fails_while_the_next_batch_is_read_is_tried_once_more():
    reading = threading.Event()

    def read(number):
        if number == 3:
            reading.set()
            time.sleep(1.5)  # longer than the failure takes, whatever else runs

    def work(numbers):
        if numbers[0] == 100.:
            reading.wait(60)
            time.sleep(.3)  # the other tower has its batch kept, too
    program = Powers([], read=read, work=work, bad_work=[2])
    with program.session() as session:
        assert program.run(session) == ('ok', [1])
        assert program.run(session) == ('bad work', [1]) and held(session) == [(0, 1), (0, 1)]
        assert program.run(session) == ('bad work', [1]) and held(session) == [(0, 0), (0, 0)]
        # TensorFlow has cancelled the reading: from here on 2.21 calls the data ended.
        session.run(program.iterator.initializer)
        session.run(program.built.train_op)
        assert program.told == [10., 10.]


@pytest.mark.slow
def test_after_a_bad_batch_a_run_of_something_else_takes_the_one_before():
    program = Powers([3])
    with program.session() as session:
        assert [program.run(session) for _ in range(2)] == [('ok', [1]), ('bad batch', [1])]
        assert held(session) == [(0, 1), (0, 1)]
        assert session.run(program.built.towers[1].inputs).tolist() == [100., 100.]
        assert held(session) == [(0, 0), (0, 0)]
        assert program.run(session) == ('ok', [1, 4])


def test_after_a_bad_batch_an_initializer_begins_anew():
    program = Powers([3])
    with program.session() as session:
        assert [program.run(session) for _ in range(2)] == [('ok', [1]), ('bad batch', [1])]
        session.run(program.iterator.initializer)
        assert held(session) == [(0, 0), (0, 0)]
        session.run(program.built.train_op)
        assert program.told == [10., 10.]  # batch 1 a second time


@pytest.mark.slow
def test_two_sessions_have_buffers_of_their_own():
    program = Program(batches())
    with program.session() as one, program.session() as other:
        assert program.steps(one, 2) == EXPECTED[:2]
        assert program.steps(other, 3) == EXPECTED[:3]
        assert program.steps(one) == EXPECTED[2:]


@pytest.fixture(scope='module')
def target():
    """A server that all tests share, as its sessions share what is in it."""
    return tf.train.Server.create_local_server(config=config()).target


def of_server(program, target, isolated=False):
    """A session on a server, with its iterator at the beginning."""
    session = tf.Session(target, config=tf.ConfigProto(isolate_session_state=isolated))
    session.run([tf.global_variables_initializer(), program.iterator.initializer])
    return session


@pytest.mark.parametrize('one_shot_iterator', [False, True])
def test_a_session_of_a_server_finds_no_batch_of_the_one_before(target, one_shot_iterator):
    program = Program(batches())
    batch = one_shot()
    built = program.built
    if one_shot_iterator:
        built = towers.build_towers(
            lambda numbers: towers.ModelOutput(tf.get_variable('w', []) * tf.reduce_mean(
                tf.cast(numbers, tf.float32)), predictions=numbers),
            batch, tf.train.GradientDescentOptimizer(0.1), DEVICES, stage_inputs=True, name='two')
    for _ in range(3):
        with tf.Session(target) as session:
            session.run([tf.global_variables_initializer(), program.iterator.initializer])
            assert [session.run([built.train_op, built.predictions])[1].tolist()
                    for _ in range(2)] == EXPECTED[:2]


@pytest.mark.slow
def test_graphs_on_a_server_take_turns(target):
    programs = []
    for first in (0, 100):
        with tf.Graph().as_default():
            program = Program(batches().map(lambda number: number + first),  # pylint: disable=W0640
                              name='tower%d' % first)
            programs.append((program, of_server(program, target)))
    for step in range(5):
        for first, (program, session) in zip((0, 100), programs):
            assert program.steps(session, 1) == [[first + each for each in EXPECTED[step]]]
    for _, session in programs:
        session.close()


@pytest.mark.slow
def test_sessions_of_one_graph_on_a_server_take_turns_where_they_are_isolated(target):
    program = Program(batches())
    one, other = [of_server(program, target, isolated=True) for _ in range(2)]
    for step in range(5):
        for session in (one, other):
            assert program.steps(session, 1) == EXPECTED[step:step + 1]
    one.close()
    other.close()


@pytest.mark.slow
def test_a_session_whose_staged_batch_another_one_threw_away_fails(target):
    program = Program(batches())
    with of_server(program, target) as one, of_server(program, target) as other:
        assert program.steps(one, 2) == EXPECTED[:2]
        other.run(program.iterator.initializer)  # leaves what the first one has staged
        assert program.steps(one, 1) == EXPECTED[2:3]
        assert program.steps(other, 1) == EXPECTED[:1]
        with pytest.raises(tf.errors.InvalidArgumentError, match='stage_inputs: a second session '
                           'of this graph .* isolate_session_state=True, .* leave stage_inputs out'
                           ) as raised:
            program.steps(one, 1)
        assert isinstance(staged_guard.explained(raised.value), towers.InputError)
        assert program.steps(other) == EXPECTED[1:]
        # Also when nothing of the other one's is there any more.
        with pytest.raises(tf.errors.InvalidArgumentError, match='stage_inputs: a second session'):
            program.steps(one, 1)
        one.run(program.iterator.initializer)
        assert program.steps(one) == EXPECTED


@pytest.mark.slow
def test_sessions_of_one_graph_on_a_server_that_step_at_the_same_time_do_not_hang(target):
    program = Program(batches(60))
    with of_server(program, target) as one, of_server(program, target) as other:
        found = in_threads(lambda: program.steps(one), lambda: program.steps(other))
    whole = [list(range(4 * k, 4 * k + 4)) for k in range(60)]
    for each in found:  # mostly an error; one that was done before the other had begun has all
        assert each == whole or 'stage_inputs: a second session' in str(each)


@pytest.mark.slow
def test_a_batch_that_a_failed_step_kept_is_not_another_sessions(target):
    program = Program(batches().map(lambda number: after(
        tf.raw_ops.Assert(condition=tf.not_equal(number[0], 8), data=['bad batch']), number)))
    with of_server(program, target) as session:
        assert program.steps(session, 1) == EXPECTED[:1]
        with pytest.raises(tf.errors.InvalidArgumentError, match='bad batch'):
            program.steps(session, 1)
    with of_server(program, target) as session:
        assert program.steps(session, 1) == EXPECTED[:1]


@pytest.mark.slow
def test_an_initializer_that_fails_leaves_what_is_staged():
    size = tf.placeholder_with_default(tf.constant(4, tf.int64), [])
    program = Program(tf.data.Dataset.range(20).batch(size).map(
        lambda numbers: tf.reshape(numbers, [4])))
    with program.session() as session:
        assert program.steps(session, 2) == EXPECTED[:2]
        with pytest.raises(tf.errors.InvalidArgumentError, match='greater than zero'):
            session.run(program.iterator.initializer, {size: 0})
        assert program.steps(session) == EXPECTED[2:]


def test_shards_are_staged_on_their_towers_while_they_work(graph):
    program = Program(batches())
    staged = {op.device for op in graph.get_operations() if op.type == 'Stage'
              and op.inputs[0].dtype != tf.string}  # whose the batch is
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
        assert set().union(*[on for name, on in ran.items()
                             if name.startswith('Unstage')]) == {'0', '1', '2'}
        assert 'IteratorGetNext' not in ran and ran['IteratorGetNextAsOptional'] == {'0'}
        # When a step is over the next batch is there, and nothing is kept of its own.
        assert held(session) == [(1, 0), (1, 0)]
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    program = Program(batches().map(lambda numbers: slow(0.05, numbers)))
    watch = InputWatch(program.built.train_op, program.built.staged)
    with program.session() as session:
        session.run(watch.initializer)
        assert program.steps(session) == EXPECTED
        span = watch.span(watch.read(session))
    assert span.steps == 5 and watch.reads == ['tower_staged/next/IteratorGetNextAsOptional']
    assert 0.1 < span.waited <= span.seconds


def initializable():
    return tf.data.make_initializable_iterator(batches())


def one_shot():
    return tf.data.make_one_shot_iterator(batches()).get_next()


def test_arguments():
    with pytest.raises(towers.InvalidArgumentError, match="expected True, False or 'first'"):
        towers.build_towers(lambda *parts: 0., one_shot(), None, DEVICES, stage_inputs='last')
    with pytest.raises(towers.InvalidArgumentError, match='needs an optimizer'):
        towers.build_towers(lambda *parts: 0., one_shot(), None, DEVICES, stage_inputs=True)


@pytest.mark.slow
def test_a_run_that_also_reads_the_programs_own_batch_fails_with_nothing_done():
    """An accuracy by labels of the `get_next()` was that of another batch."""
    program = Program(batches(20))
    graph = tf.get_default_graph()
    own = graph.get_operation_by_name('IteratorGetNext').outputs[0]
    equal = tf.reduce_all(tf.equal(program.built.predictions, own))
    with program.session() as session:
        for fetches in ([program.built.train_op, own], [own, program.built.train_op],
                        [program.built.predictions, equal]):
            # A run that fails while a batch is read cancels the iterator at times.
            session.run(program.iterator.initializer)
            with pytest.raises(tf.errors.AlreadyExistsError, match='stage_inputs: .* from built.tow'
                               'ers.i..inputs, .* or leave stage_inputs out') as raised:
                session.run(fetches)
            # TensorFlow 2 has a page of stack traces before that.
            assert 'built.towers' in str(raised.value).split('File "')[0]
            assert 'IteratorGetNext' not in raised.value.message.split('[[')[0].split('Node:')[-1]
        assert program.weight(session) == 1.
        error = staged_guard.explained(raised.value)
        assert isinstance(error, towers.InputError) and str(error).startswith('stage_inputs: a run')
        assert str(error).endswith('or leave stage_inputs out.')
        assert staged_guard.explained(tf.errors.NotFoundError(None, None, 'no file')) is None
        # Each alone goes on.
        session.run(program.iterator.initializer)
        assert session.run(own).tolist() == EXPECTED[0]
        session.run(program.iterator.initializer)
        assert program.steps(session, 2) == EXPECTED[:2]


def test_a_session_of_ours_raises_an_input_error_for_a_second_batch(tmp_path):
    step = tf.train.get_or_create_global_step()
    batch = one_shot()
    built = towers.build_towers(
        lambda numbers: tf.reduce_mean(tf.cast(numbers, tf.float32)) * tf.get_variable('w', []),
        batch, tf.train.GradientDescentOptimizer(0.1), DEVICES, stage_inputs=True, global_step=step)
    with pytest.raises(towers.InputError, match='^stage_inputs: a run that takes the batch'):
        with towers.training_session(str(tmp_path), step, [], config(), say=lambda line: None
                                     ) as session:
            session.run([built.train_op, batch])


def test_two_builds_cannot_read_ahead_from_one_iterator():
    program = Program(batches(), name='one')
    for inputs in (tf.get_default_graph().get_operation_by_name('IteratorGetNext').outputs[0],
                   program.iterator.get_next()):
        with pytest.raises(towers.InputError, match="'IteratorV2', from which another build reads "
                           "ahead .'one_staged'"):
            towers.build_towers(lambda numbers: 0., inputs, tf.train.GradientDescentOptimizer(0.1),
                                DEVICES, name='two', stage_inputs=True)


def test_an_iterator_that_is_saved_is_refused_when_built_and_when_a_session_begins():
    program = Program(batches())
    other = tf.data.make_initializable_iterator(batches())
    tf.data.experimental.make_saveable_from_iterator(other)
    staged_guard.check_iterators(tf.get_default_graph())
    tf.data.experimental.make_saveable_from_iterator(program.iterator)
    with pytest.raises(towers.InputError, match="the state of 'IteratorV2' is saved"):
        staged_guard.check_iterators(tf.get_default_graph())
    with pytest.raises(towers.InputError, match='one batch ahead .* dataset.skip'):
        towers.build_towers(lambda numbers: 0., other.get_next(),
                            tf.train.GradientDescentOptimizer(0.1), DEVICES, name='other',
                            stage_inputs=True)


def test_an_iterator_that_a_hook_saves_is_refused_when_the_session_begins():
    class Saves(tf.train.SessionRunHook):
        def begin(self):
            tf.data.experimental.make_saveable_from_iterator(program.iterator)
    program = Program(batches())
    watch = towers.InputWatchHook(program.built, say=None)
    with pytest.raises(towers.InputError, match='one batch ahead'):
        with tf.train.MonitoredSession(tf.train.ChiefSessionCreator(config=config()),
                                       [Saves(), watch]):
            pass


def test_an_initializer_that_is_made_after_the_build_is_refused_when_a_session_begins():
    iterator = tf.data.Iterator.from_structure(tf.int64, tf.TensorShape([4]))
    iterator.make_initializer(batches())
    towers.build_towers(
        lambda numbers: tf.reduce_mean(tf.cast(numbers, tf.float32)) * tf.get_variable('w', []),
        iterator.get_next(), tf.train.GradientDescentOptimizer(0.1), DEVICES, stage_inputs=True)
    graph = tf.get_default_graph()
    staged_guard.check_iterators(graph)
    iterator.make_initializer(batches(), name='late')
    with pytest.raises(towers.InputError, match="'late', which initializes 'Iterator(V2)?', was "
                       'made after build_towers: .* Make it before'):
        staged_guard.check_iterators(graph)


def test_several_iterators_that_can_be_initialized_later_are_refused_when_a_session_begins():
    iterators = [tf.data.Iterator.from_structure(tf.int64, tf.TensorShape([4])) for _ in range(2)]
    towers.build_towers(
        lambda *parts: tf.reduce_mean(tf.cast(parts[0] + parts[1], tf.float32)) * tf.get_variable(
            'w', []), tuple(each.get_next() for each in iterators),
        tf.train.GradientDescentOptimizer(0.1), DEVICES, stage_inputs=True)
    staged_guard.check_iterators(tf.get_default_graph())
    iterators[0].make_initializer(batches())
    with pytest.raises(towers.InputError, match='they come from several iterators'):
        staged_guard.check_iterators(tf.get_default_graph())


@pytest.mark.slow
@pytest.mark.parametrize('device', ['', '/cpu:0'])
def test_an_iterator_is_known_by_its_shared_name(device):
    with tf.device(device):
        other = tf.data.make_initializable_iterator(batches(), shared_name='one')
    elsewhere = []
    for where, name in (('/cpu:1', 'one'), ('', 'two')):
        with tf.device(where):
            elsewhere.append(tf.data.make_initializable_iterator(batches(), shared_name=name))
    iterator = tf.data.make_initializable_iterator(batches(), shared_name='one')
    seen = trained_on(iterator)
    with tf.Session(config=config()) as session:
        session.run([tf.global_variables_initializer(), iterator.initializer])
        assert [seen(session) for _ in range(2)] == EXPECTED[:2]
        session.run([each.initializer for each in elsewhere])
        assert seen(session) == EXPECTED[2]
        session.run(other.initializer)
        assert [seen(session) for _ in range(5)] == EXPECTED
    with pytest.raises(towers.InputError, match='from which another build reads ahead'):
        towers.build_towers(lambda numbers: 0., other.get_next(),
                            tf.train.GradientDescentOptimizer(0.1), DEVICES, name='two',
                            stage_inputs=True)


def test_a_batch_that_is_fed_is_an_error_and_not_passed_over(tmp_path):
    factor = tf.constant(2, tf.int64)
    step = tf.train.get_or_create_global_step()
    between = []

    def doubled(batch):
        between.extend([batch, batch * factor])
        return between[-1]
    program = Program(batches(), between=doubled, global_step=step)
    with program.session() as session:
        for fed, value in zip(between + [factor], ([7] * 4, [7] * 4, 7)):
            with pytest.raises(ValueError, match='may not be fed'):
                session.run(program.built.train_op, {fed: value})
        assert program.weight(session) == 1.
        assert program.steps(session, 1) == [[0, 2, 4, 6]]
    with pytest.raises(towers.InputError, match='^stage_inputs: Tensor .* may not be fed: the step '
                       'trains on a batch that was read a step ago.* Feed built.towers'):
        with towers.training_session(str(tmp_path), step, [], config(), say=lambda line: None
                                     ) as session:
            session.run(program.built.train_op, {factor: 7})


def test_a_scalar_is_to_be_repeated_where_a_closure_would_have_the_next_batch():
    dataset = batches().map(lambda numbers: (numbers, numbers[0]))
    inputs = tf.data.make_one_shot_iterator(dataset).get_next()
    with pytest.raises(towers.InputError, match='is a scalar .* with stage_inputs repeat it for '
                       'each example within the dataset'):
        towers.build_towers(lambda *parts: 0., inputs, tf.train.GradientDescentOptimizer(0.1),
                            DEVICES, stage_inputs=True)
    with pytest.raises(towers.InputError, match='is a scalar .* from its closure'):
        towers.build_towers(lambda *parts: 0., inputs, tf.train.GradientDescentOptimizer(0.1),
                            DEVICES)


@pytest.mark.slow
def test_feeding_all_towers_is_an_error_and_feeding_one_takes_a_batch():
    program = Program(batches())
    inputs = [tower.inputs for tower in program.built.towers]
    fetches = [program.built.train_op, program.built.predictions]
    with program.session() as session:
        assert session.run(fetches, {inputs[1]: [7, 7]})[1].tolist() == [0, 1, 7, 7]
        assert program.steps(session, 1) == EXPECTED[1:2]
        weight = program.weight(session)
        with pytest.raises(tf.errors.NotFoundError, match="stage_inputs: all towers of 'tower' are "
                           'fed by hand .* without stage_inputs') as raised:
            session.run(fetches, {each: [7, 7] for each in inputs})
        assert 'fed_by_hand' in str(raised.value).split('File "')[0].replace(' ', '_')
        assert program.weight(session) == weight
        assert isinstance(staged_guard.explained(raised.value), towers.InputError)
        # A forward pass alone takes none.
        fed = session.run(program.built.predictions, {each: [7, 7] for each in inputs})
        assert fed.tolist() == [7] * 4


def test_a_model_of_random_numbers_alone_trains():
    """It uses nothing of its inputs, and not since they are fed."""
    built = towers.build_towers(
        lambda numbers: tf.get_variable('w', [], initializer=tf.zeros_initializer()) * (
            1. + 0. * tf.random_uniform([])),
        one_shot(), tf.train.GradientDescentOptimizer(1.), DEVICES, 'mean', stage_inputs=True)
    with tf.Session(config=config()) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        assert session.run(built.variables[0]) == -1.
