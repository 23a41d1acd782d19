"""trainer.rate_finder: rates, smoothed losses and the proposal by hand; a run on a linear model."""

import types

from absl.testing import flagsaver
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from trainer import rate_finder
from trainer.flags import FLAGS
from trainer.job import Setup
from trainer.rate_finder import Trial, curve, proposed_rate, rates, smoothed


def test_rates_grow_by_one_factor():
    assert rates(8) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, .1, 1., 10.])


def test_losses_are_smoothed_until_they_diverge():
    found = smoothed([Trial(.1, 1.), Trial(.2, 2.), Trial(.4, 30.), Trial(.8, 1.)])
    # 1; (0.9 * 0.1 + 0.2) / 0.19; (0.81 * 0.1 + 0.9 * 0.2 + 3) / 0.271, which is over 4
    assert [trial.rate for trial in found] == [.1, .2, .4]
    assert [trial.loss for trial in found] == pytest.approx([1., .29 / .19, 3.261 / .271])


def test_a_negative_loss_that_falls_has_not_diverged():
    rates_tried = [trial.rate for trial in smoothed([
        Trial(.1, -1.), Trial(.2, -2.), Trial(.4, -2.), Trial(.8, 900.), Trial(1.6, 0.)])]
    assert rates_tried == [.1, .2, .4, .8]


def test_the_proposal_is_a_tenth_of_the_best_rate():
    trials = [Trial(.01, 3.), Trial(.1, 1.), Trial(1., 2.)]
    assert proposed_rate(trials) == pytest.approx(.01)
    assert proposed_rate(trials[1:]) is None and proposed_rate(trials[:1]) is None
    assert curve(trials).splitlines()[1] == '  1.00e-02     3         ' + 40 * '#'


class Quadratic:
    """A loss w^2 / 2 with w = 1 at the start."""
    image_format, unit, regularization = {}, 'example', 'none'

    def model_fn(self, unused_mode):
        def model_fn(values):
            w = tf.get_variable('w', [], initializer=tf.ones_initializer())
            return tf.reduce_mean(values) * w ** 2 / 2
        return model_fn


@pytest.mark.slow
def test_a_run(tmp_path, capsys):
    def train_batches(**unused):
        return tf.data.Dataset.from_tensors(np.ones([6, 3], np.float32)).repeat()
    setup = Setup(Quadratic(), types.SimpleNamespace(
        train_batches=train_batches, num_examples={'train': 12}), 6)
    path = str(tmp_path / 'rates.csv')
    with flagsaver.flagsaver():
        FLAGS(['train.py', '--optimizer=sgd', '--reduction=mean', '--train_dir=%s' % tmp_path])
        with flagsaver.flagsaver(rate_plot=path, rate_steps=71):
            rate_finder.find_rate(setup)
    lines = open(path).read().splitlines()
    # Rates grow by 10^0.1; w falls by the factor 1 - rate, the loss by its square.
    w, trials = 1., []
    for rate in rates(71):
        trials.append(Trial(rate, w * w / 2))
        w *= 1 - rate
    expected = smoothed(trials)
    assert lines[0] == 'rate,loss' and len(lines) == 1 + len(expected)
    got = [tuple(map(float, line.split(','))) for line in lines[1:]]
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-6)
    assert 'proposal       a rate of %.2g' % proposed_rate(expected) in capsys.readouterr().out
    assert sorted(each.name for each in tmp_path.iterdir()) == ['rates.csv']  # nothing is saved
