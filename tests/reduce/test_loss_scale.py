"""towers.loss_scale: no number moves but the scale's own; one overflow skips the step for all."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import kind_of_variables  # noqa: F401, a fixture
from sample_models import (assert_equal_runs, embedding, l2_of_kernels, momentum, objective,
                           on_towers, one_device, slim_layers, tokens, vectors)
from towers.errors import GradientError, InvalidArgumentError
from towers.nonfinite import explained
from towers.reduce.loss_scale import LossScale

pytestmark = pytest.mark.usefixtures('kind_of_variables')

GOOD = [1., 2., 3., 6.]
HUGE = 3e38  # a float32 goes to 3.4e38: on two towers 4 / 2 times as much is infinite


class Job:
    """loss = mean(x * w), w = 1e-30: its gradient is mean(x), large while the loss is small."""

    def __init__(self, num_towers=2, rule=LossScale(4., 2), optimizer=None, check_numerics=False,
                 **options):
        self.x = tf.placeholder(tf.float32, [4])
        self.step_number = tf.train.get_or_create_global_step()

        def model_fn(x):
            w = tf.get_variable('w', [], initializer=tf.constant_initializer(1e-30))
            return tf.reduce_mean(x * w)
        self.built = towers.build_towers(
            model_fn, self.x, objective(optimizer or tf.train.MomentumOptimizer(1., 0.5), options),
            num_towers, 'mean',
            numerics=towers.Numerics(loss_scale=rule, check_numerics=check_numerics),
            global_step=self.step_number, **options)
        self.session = tf.Session(config=towers.session_config(self.built.devices))
        self.session.run(tf.global_variables_initializer())

    def step(self, x):
        """(scale used, skipped so far) of one step."""
        scaled = self.built.scaled_losses
        return tuple(self.session.run([scaled.scale, scaled.skipped_steps, self.built.train_op],
                                      {self.x: x})[:2])

    def state(self):
        """[w, slots..., scale, good steps, skipped steps, global step]"""
        return self.session.run(self.built.variables + self.built.slots
                                + self.built.scaled_losses.variables + [self.step_number])


def test_the_scale_stays_within_its_bounds_and_no_step_is_applied_meanwhile():
    job = Job(rule=LossScale(4., 1, factor=4., least=2., most=8.))
    used = [job.step(x)[0] for x in (GOOD, GOOD) + ([float('inf')] * 4,) * 3]
    assert used == [4., 8., 8., 2., 2.]
    assert job.state()[:2] == [pytest.approx(-3. - 4.5), 4.5]  # of the two good steps


def test_the_scale_shrinks_on_overflow_and_grows_after_good_steps():
    job = Job()
    assert job.state() == [np.float32(1e-30), 0., 4., 0, 0, 0]
    # Of the first overflow the towers' plus and minus infinity add up to NaN.
    overflows = [HUGE, HUGE, -HUGE, -HUGE], [HUGE] * 4
    used = [job.step(x) for x in (GOOD, GOOD, overflows[0], GOOD, overflows[1], GOOD, GOOD)]
    # Twice good: x 2. Overflow: / 2, and the count starts anew.
    assert used == [(4., 0), (4., 0), (8., 1), (4., 1), (4., 2), (2., 2), (2., 2)]
    assert job.state()[2:] == [4., 0, 2, 7]


@pytest.mark.slow
def test_a_skipped_step_moves_no_copy_of_a_replicated_variable():
    def states(variable_device):
        with tf.Graph().as_default():
            job = Job(2, optimizer=tf.train.AdamOptimizer(0.1),
                      variables=towers.VariablePlacement(variable_device))
            job.session.run(tf.local_variables_initializer())
            found = []
            for x in (GOOD, [HUGE] * 4, GOOD):
                job.step(x)
                found.append(job.state())
            copies = job.built.replicas
            if copies is not None:
                assert len(copies.variables) == 1 and len(copies.slots) == 2
                assert job.session.run(copies.variables) == found[-1][:1]
            return found
    shared, copied = states(None), states('replicated')
    assert copied == shared
    assert shared[1][:5] == shared[0][:5]  # w, two slots and two powers of beta
    assert shared[2][0] < shared[1][0]


def test_a_transformation_cannot_hide_an_overflow():
    def clip(pairs):
        return [(tf.clip_by_value(gradient, -1., 1.), v) for gradient, v in pairs]
    job = Job(transform_gradients=clip)
    assert job.step([HUGE] * 4) == (4., 1)
    assert job.state()[:2] == [np.float32(1e-30), 0.]
    job.step(GOOD)
    assert job.state()[1] == 1.  # it sees 3, not 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize('model_fn, data, penalty, num_towers, reduction', [
    (slim_layers, vectors(8), l2_of_kernels, 2, 'sum'), (embedding, tokens(8), None, 4, 'mean')],
                         ids=['slim', 'embedding'])
def test_towers_with_a_scale_are_one_device_without(model_fn, data, penalty, num_towers, reduction):
    ours = on_towers(model_fn, data, momentum, num_towers, reduction=reduction,
                     numerics=towers.Numerics(loss_scale=LossScale(2. ** 15)), regularization='add')
    ours = ours._replace(variables={name: value for name, value in ours.variables.items()
                                    if not name.startswith('towers/')})
    plain = one_device(model_fn, data, momentum, ours.initial, penalty=penalty,
                       factor=num_towers if reduction == 'sum' else 1)
    assert_equal_runs(ours, plain)


def test_gradients_too_small_for_half_precision_survive():
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=tf.ones_initializer())
        half = tf.cast(w, tf.float16) * x
        return tf.reduce_mean(tf.cast(half, tf.float32)) * 2. ** -26  # float16 ends at 2 ** -24
    gradients = []
    for rule in (None, LossScale(2. ** 15)):
        with tf.Graph().as_default():
            built = towers.build_towers(model_fn, np.ones([4], np.float16),
                                        tf.train.GradientDescentOptimizer(1.), 2, 'mean',
                                        numerics=towers.Numerics(loss_scale=rule))
            with tf.Session(config=towers.session_config(2)) as session:
                session.run(tf.global_variables_initializer())
                gradients.append(session.run(built.gradients[0][0]))
    assert gradients == [0., 2. ** -26]


def test_a_variable_in_half_precision_is_refused():
    def model_fn(x):
        return tf.reduce_mean(x * tf.get_variable('net/w', [], tf.float16))
    with pytest.raises(GradientError) as caught:
        towers.build_towers(model_fn, np.ones([4], np.float16),
                            tf.train.GradientDescentOptimizer(1.), 2,
                            numerics=towers.Numerics(loss_scale=LossScale()))
    assert str(caught.value) == (
        "the gradient of 'net/w' is float16: a scaled loss needs variables in float32, which "
        'operations may well read in half precision.')


# ---- what is not a number although the scale is at its least -------------------------------------

def test_with_check_numerics_a_loss_that_is_no_number_is_a_failure_at_any_scale():
    job = Job(check_numerics=True)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        job.step([1., 1., np.nan, 1.])
    assert str(explained(caught.value, 1)).startswith('the loss of tower 1 is NaN in step 1. ')
    assert job.state()[2:] == [4., 0, 0, 0]


# ---- checkpoints, plan, arguments ----------------------------------------------------------------

@pytest.mark.slow
def test_a_run_that_resumes_is_the_run_that_never_stopped(tmp_path):
    batches = [GOOD, [HUGE] * 4, GOOD, GOOD, [1., 1., HUGE, HUGE], GOOD]
    job = Job()
    whole = [job.step(x) for x in batches]
    expected = job.state()
    parts = []
    prefix = None
    for some in (batches[:3], batches[3:]):
        with tf.Graph().as_default():
            job = Job()
            saver = tf.train.Saver()
            if prefix:
                saver.restore(job.session, prefix)
            parts += [job.step(x) for x in some]
            prefix = saver.save(job.session, str(tmp_path / 'model'))
            state = job.state()
    assert parts == whole and state == expected
    assert {name for name, _ in tf.train.list_variables(prefix)} == {
        'global_step', 'w', 'w/Momentum', 'towers/loss_scale', 'towers/good_steps',
        'towers/skipped_steps'}


@pytest.mark.parametrize('arguments, text', [
    (dict(initial=0.5), 'LossScale(initial=0.5, factor=2.0, least=1.0, most=16777216.0): expected '
                        'least <= initial <= most, and a factor above 1'),
    (dict(initial=4., most=2.), 'LossScale(initial=4.0, factor=2.0, least=1.0, most=2.0): '),
    (dict(factor=1.), 'LossScale(initial=32768.0, factor=1.0, '),
    (dict(initial=float('nan')), 'initial=nan: expected a positive float32.'),
    (dict(most=1e39), 'most=1e+39: expected'),
    (dict(growth_steps=-1), 'growth_steps=-1: expected a whole number of at least 0.'),
    (dict(growth_steps=True), 'growth_steps=True: ')])
def test_rules_that_make_no_sense(arguments, text):
    with pytest.raises(InvalidArgumentError) as caught:
        LossScale(**arguments)
    assert str(caught.value).startswith(text)
