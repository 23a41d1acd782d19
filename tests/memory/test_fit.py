"""The largest batch that fits."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import InvalidArgumentError, MeasurementError, OutOfMemoryError
from towers.memory import fit
from towers.memory.measure import MeasuredMemory


def build(batch_size, num_towers=2, **options):
    x = tf.random_uniform([batch_size, 1000])

    def model(x):
        weights = tf.get_variable('weights', [1000, 500], use_resource=True)
        return tf.reduce_mean(tf.sigmoid(tf.matmul(x, weights)))
    return towers.build_towers(model, (x,), tf.train.MomentumOptimizer(0.1, 0.9), num_towers,
                               **options), []


def test_the_largest_fits_and_one_more_a_tower_does_not():
    built, _ = build(8)
    limit = 20 * 10 ** 6
    fitted = towers.largest_batch(built, limit)
    assert fitted.batch_size == 2 * fitted.per_tower > 8
    assert fitted.account.peak <= limit
    more = max(1, fitted.per_tower // 64) + 1  # as near as it looks
    assert towers.memory_account(built, 2 * (fitted.per_tower + more)).peak > limit


def test_no_more_than_the_examples_that_there_are():
    built, _ = build(8)
    assert towers.largest_batch(built, 10 ** 9, 31).batch_size == 30
    assert towers.largest_batch(built, 10 ** 9, 2).batch_size == 2
    with pytest.raises(InvalidArgumentError, match='most=1 examples leave some of 2 towers'):
        towers.largest_batch(built, 10 ** 9, 1)


def test_no_less_than_the_sum_of_the_shares():
    built, _ = build(8, shares=(3, 1))
    with pytest.raises(InvalidArgumentError, match='most=3 examples leave some of 2 towers'):
        towers.largest_batch(built, 10 ** 9, 3)


@pytest.mark.slow
def test_limits_that_are_whole_floats():
    built, _ = build(8)
    assert towers.largest_batch(built, 20e6) == towers.largest_batch(built, 20 * 10 ** 6)
    assert towers.largest_batch(built, 20e6).limit == 20 * 10 ** 6
    for limit in (0.5, 20e6 + 0.5, 0., float('inf')):
        with pytest.raises(InvalidArgumentError, match='expected a whole number of bytes, such as'):
            towers.largest_batch(built, limit)


@pytest.mark.slow
def test_it_says_where_the_search_ends(monkeypatch):
    built, _ = build(8)
    fitted = towers.largest_batch(built, 20e6)
    assert not fitted.ends_search and 'more may fit' not in str(fitted)
    monkeypatch.setattr(fit, 'MOST_PER_TOWER', fitted.per_tower // 2)
    ended = towers.largest_batch(built, 20e6)
    assert fitted.per_tower // 2 * 0.98 < ended.per_tower <= fitted.per_tower // 2
    assert ended.ends_search
    assert str(ended).endswith('; the search ends here, and more may fit')
    assert not towers.largest_batch(built, 20e6, 8).ends_search


@pytest.mark.slow
def test_micro_batches_are_called_so():
    built, _ = build(12, 2, memory=towers.Memory(accumulate=3))
    fitted = towers.largest_batch(built, 10 ** 9, 60)
    assert (fitted.batch_size, fitted.per_tower, fitted.micro_batches) == (60, 30, 3)
    assert str(fitted).startswith('batch 60, 30 a tower in 3 micro-batches: ')
    with pytest.raises(OutOfMemoryError, match='not one example a micro-batch fits'):
        towers.largest_batch(built, 10 ** 6)


def test_what_does_not_fit_at_all():
    built, _ = build(8)
    with pytest.raises(OutOfMemoryError) as caught:
        towers.largest_batch(built, 10 ** 6)
    assert 'not one example a tower fits' in str(caught.value)
    assert 'weights' in str(caught.value)


@pytest.mark.slow
def test_it_is_confirmed_by_running(monkeypatch):
    ran, lines = [], []

    def measured(built, **unused):
        ran.append(built.plan.batch_size)
        return MeasuredMemory({'': 30 * 10 ** 6 if len(ran) == 1 else 19 * 10 ** 6}, {'': ''},
                              built.plan.batch_size)
    monkeypatch.setattr(fit, 'measure_memory', measured)
    fitted = towers.fit_batch_size(build, 8, 20 * 10 ** 6, lines.append)
    assert len(ran) == 2 and ran[1] < ran[0]
    assert fitted.batch_size == ran[1] and fitted.measured.peak == 19 * 10 ** 6
    assert lines[0].endswith('30.0 MB measured: trying less')
    assert lines[1] == str(fitted)


@pytest.mark.slow
def test_a_batch_that_runs_out_of_memory_is_not_taken(monkeypatch):
    ran = []

    def measured(built, **unused):
        ran.append(built.plan.batch_size)
        if len(ran) < 3:
            raise tf.errors.ResourceExhaustedError(None, None, 'OOM when allocating tensor')
        raise MeasurementError('it does not count here')
    monkeypatch.setattr(fit, 'measure_memory', measured)
    fitted = towers.fit_batch_size(build, 8, 20 * 10 ** 6)
    assert len(ran) == 3 and ran[0] > ran[1] > ran[2] == fitted.batch_size
    assert fitted.measured is None
