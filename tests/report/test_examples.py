"""The number of examples of a traced step, from the graph or from the trace."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import linear, sgd
from towers.report.examples import examples_of_step
from towers.report.page import report_in
from traces import FULL


def traced(num_examples, remainder='error', **options):
    """A build of a batch of any size, and the metadata of a step of so many examples."""
    inputs = tuple(tf.placeholder(tf.float64, [None, size]) for size in (6, 3))
    built = towers.build_towers(linear, inputs, sgd(), 2, remainder=remainder, **options)
    metadata = tf.RunMetadata()
    feed = {each: np.ones([num_examples, each.shape[1]]) for each in inputs}
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op, feed, options=FULL, run_metadata=metadata)
    return built, metadata


def test_a_static_batch_needs_no_trace():
    built = towers.build_towers(linear, samples.vectors(4), sgd(), 2)
    assert examples_of_step(built, tf.RunMetadata()) == 4


@pytest.mark.parametrize('remainder, num_examples, expected', [
    ('weight', 5, 5), ('weight', 1, None)] + [  # the second shard is padding
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            ('drop', 5, 4),  # the last one is left out
            ('error', 6, 6), ('error', 2, 2), ('weight', 2, None)]])
def test_a_batch_of_any_size_is_counted_in_the_trace(remainder, num_examples, expected):
    with tf.Graph().as_default():
        assert examples_of_step(*traced(num_examples, remainder)) == expected


def test_micro_batches_count_together():
    assert examples_of_step(*traced(8, memory=towers.Memory(accumulate=2))) == 8


def test_a_trace_without_the_shards_tells_nothing():
    built, _ = traced(6)
    assert examples_of_step(built, tf.RunMetadata()) is None


def test_the_page_says_examples_a_second_and_processors(tmp_path, monkeypatch):
    monkeypatch.setattr('os.sched_getaffinity', lambda process: {0, 2, 5}, raising=False)
    built, metadata = traced(6)
    path = str(tmp_path / 'step.html')
    report = towers.step_report(built, metadata, path)
    data = report_in(path)
    assert data['title'] == '2 towers on /cpu:0, /cpu:1, batch 6'
    assert data['subtitle'].startswith('A step of %.2f ms for 6 examples: ' % report.milliseconds)
    a_second = data['subtitle'].split(': ')[1].split(' a second')[0].replace(',', '')
    assert float(a_second) == pytest.approx(6000 / report.milliseconds, rel=.01)
    assert 'on 3 processors;' in data['subtitle']
    assert any(fact.endswith('this process may use 3 processors.') for fact in data['facts'])
    without = tf.RunMetadata()
    without.CopyFrom(metadata)
    for device in without.step_stats.dev_stats:
        for node in device.node_stats:
            del node.output[:]
    towers.step_report(built, without, path)
    assert report_in(path)['title'].endswith('a batch of any size')
    assert 'a second' not in report_in(path)['subtitle']
