"""The arms of the claim: towers, batches, rates, and the flags that train.py gets."""

import json

import pytest

from benchmarks.batch_scaling.arms import make_arms, train_flags
from scaling_samples import settings
from towers.errors import InvalidArgumentError


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
