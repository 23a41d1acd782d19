"""The arms of the claim: towers, batches, rates, and the flags that train.py gets."""

import json

import pytest

from benchmarks.batch_scaling.arms import make_arms, train_flags
from scaling_samples import settings
from towers.errors import InvalidArgumentError
from trainer.arguments import make_learning_rate
from trainer.command_line import parse_flags
from trainer.flags import FLAGS


def test_arms_of_the_paper():
    arms = make_arms(settings(batch_size=100))
    assert [(arm.key, arm.towers, arm.batch_size, arm.rate) for arm in arms] == [
        ('one', 1, 100, 0.001), ('sqrt', 4, 400, 0.002), ('same', 4, 400, 0.001),
        ('linear', 4, 400, 0.004), ('big', 1, 400, 0.002), ('sync', 4, 400, 0.002)]
    assert [arm.label for arm in arms] == [
        '1 x 100 at 0.001', '4 x 100 at 0.002', '4 x 100 at 0.001', '4 x 100 at 0.004',
        '1 x 400 at 0.002', '4 x 100 at 0.002, in sync']


def test_larger_factors_are_accumulated_and_not_in_sync():
    arms = make_arms(settings(factors=[1, 2, 4, 16]), ['one', 'linear', 'sync'])
    assert [(arm.key, arm.towers, arm.accumulate, arm.batch_size, arm.rate, arm.batch_norm)
            for arm in arms] == [
        ('one', 1, 1, 25, 0.001, 'shard'), ('linear-x2', 2, 1, 50, 0.002, 'shard'),
        ('linear', 4, 1, 100, 0.004, 'shard'), ('linear-x16', 4, 4, 400, 0.016, 'shard'),
        ('sync-x2', 2, 1, 50, pytest.approx(0.001 * 2 ** 0.5), 'sync'),
        ('sync', 4, 1, 100, 0.002, 'sync')]
    assert arms[3].label == '4 x 4 x 25 at 0.016' and arms[3].kind == 'linear'
    flags = train_flags(settings(factors=[1, 2, 4, 16]), arms[3], 1)
    assert '--accumulate=4' in flags and '--log_every=1' in flags
    assert '--batch_norm=sync' in train_flags(settings(), arms[5], 1)
    with pytest.raises(InvalidArgumentError, match='does not divide among 4 towers'):
        make_arms(settings(factors=[6]))


def flags_of(name, **changes):
    the_settings = settings(**changes)
    arm, = make_arms(the_settings, [name])
    flags = dict(flag[2:].partition('=')[::2] for flag in train_flags(the_settings, arm, 1))
    return dict(flags, **json.loads(flags['config']))


def test_all_arms_log_evaluate_and_end_at_the_same_examples():
    for name in ('one', 'sqrt', 'same', 'linear', 'big'):
        flags = flags_of(name)
        batch = int(flags['batch_size'])
        assert int(flags['train_steps']) * batch == 600
        assert int(flags['eval_steps']) * batch == int(flags['save_steps']) * batch == 200
        assert int(flags['log_every']) * batch == 100
        assert flags['seed'] == '1'


def test_flags_of_the_arms():
    one, claim, big = flags_of('one'), flags_of('sqrt'), flags_of('big')
    assert (one['num_towers'], one['batch_size'], one['lr_scaling']) == ('1', '25', 'none')
    assert (claim['num_towers'], claim['batch_size'], claim['lr_scaling']) == ('4', '100', 'sqrt')
    assert (big['num_towers'], big['batch_size'], big['lr_scaling']) == ('1', '100', 'sqrt')
    assert {each['base_batch_size'] for each in (one, claim, big)} == {25}
    assert {each['base_learning_rate'] for each in (one, claim, big)} == {'0.001'}
    # Batch norm's averages forget as much an example: four steps of 0.9 are one of 0.6561.
    assert (one['batch_norm_decay'], claim['batch_norm_decay'], big['batch_norm_decay']) == (
        0.9, 0.6561, 0.6561)
    assert 'aux_loss_weight' not in one and 'data_dir' not in one
    other = flags_of('sqrt', aux_loss_weight=0., batch_norm_decay=None, data_dir='/data',
                     optimizer='momentum', reduction='sum', warmup_epochs=[2.])
    assert other['aux_loss_weight'] == 0 and other['data_dir'] == '/data'
    assert 'batch_norm_decay' not in other and other['warmup_epochs'] == '2'
    assert (other['optimizer'], other['reduction']) == ('momentum', 'sum')


@pytest.mark.parametrize('name, rate', [('one', 0.001), ('linear', 0.004), ('big', 0.002)])
def test_train_py_makes_that_rate_of_them(name, rate):
    the_settings = settings(warmup_epochs=[1.])
    arm, = make_arms(the_settings, [name])
    from absl.testing import flagsaver
    with flagsaver.flagsaver():
        FLAGS.unparse_flags()
        parse_flags(['train.py'] + train_flags(the_settings, arm, 1))
        made = make_learning_rate(arm.batch_size, arm.towers, 1437, 10)
    assert made.peak == pytest.approx(rate) and arm.rate == pytest.approx(rate)
    # Where a rate is scaled its warm-up starts from r, on one tower too.
    assert made.base == pytest.approx(0.001)
