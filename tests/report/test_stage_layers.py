"""The layers of a stage: whose time an operation is, and which name scopes are rows."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import sgd
from towers.placement.devices import short_name
from towers.placement.tower_device import operation_device
from towers.report.parts import StepParts
from towers.report.stage_layers import Layer, layers_of_stage
from towers.report.trace import Traced
from traces import trace_of

STAGES = [['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']]


def product(x):
    return tf.matmul(x, tf.get_variable('weights', [6, 6], tf.float64))


def body_and_head(body):
    """A model function of two stages, of which `body` is the first."""
    def model(x):
        with towers.stage(0):
            x = body(x)
        with towers.stage(1), tf.variable_scope('head'):
            return tf.reduce_mean(product(x))
    return model


def two_layers(x):
    for name in 'ab':
        with tf.variable_scope(name):
            x = product(x)
    return x


def layers(body, tower, device, scope='', **options):
    """The layers of a build of which each product took 10 microseconds, and nothing else ran."""
    options.setdefault('devices', STAGES)
    with tf.Graph().as_default(), tf.name_scope(scope):
        built = towers.build_towers(body_and_head(body), np.ones([8, 6]), sgd(), reduction='mean',
                                    **options)
        parts = StepParts(built)
    trace = trace_of(*[
        Traced(op.name, op.type, short_name(operation_device(op)), parts.places[op.name], 0, 10)
        for op in parts.operations if op.type == 'MatMul'])
    return layers_of_stage(trace, parts, built.towers, tower, device)


def test_the_time_of_all_micro_batches_in_both_passes():
    pipeline = towers.Pipeline(2)
    assert layers(two_layers, 0, '/cpu:0', pipeline=pipeline) == [
        Layer('a/MatMul', 20, 40, 6), Layer('b/MatMul', 20, 40, 6)]
    assert layers(two_layers, 1, '/cpu:3', pipeline=pipeline) == [Layer('head/MatMul', 20, 40, 6)]


def test_names_are_the_models_own_in_each_tower_and_in_a_scope_of_the_caller():
    first = layers(two_layers, 0, '/cpu:0', scope='mine')
    second = layers(two_layers, 1, '/cpu:2', scope='mine')
    assert first == second == [Layer('a/MatMul', 10, 20, 3), Layer('b/MatMul', 10, 20, 3)]


@pytest.mark.slow
def test_the_longest_scopes_are_divided():
    def body(x):
        for block in range(3):
            with tf.variable_scope('net/block_%d' % block):
                for number in range(2 + 12 * (block == 1)):
                    with tf.variable_scope('layer_%d' % number):
                        x = product(x)
        return x
    names = [layer.name for layer in layers(body, 0, '/cpu:0')]
    assert names == (['net/block_0']
                     + ['net/block_1/layer_%d/MatMul' % number for number in range(14)]
                     + ['net/block_2'])


@pytest.mark.slow
def test_what_takes_least_is_one_row():
    def body(x):
        with tf.variable_scope('', reuse=tf.AUTO_REUSE):
            for _ in range(20):
                x = product(x)
        return x
    found = layers(body, 0, '/cpu:0')
    assert len(found) == 17
    assert found[-1].name == '' and found[-1].num_operations == 3 * (20 - 16)
    assert sum(layer.micros for layer in found) == 600


def test_a_scope_of_operations_alone_is_not_divided():
    def body(x):
        for name in 'ab':
            with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
                x = product(product(x) if name == 'a' else x)
        return x
    assert layers(body, 0, '/cpu:0') == [Layer('a', 20, 40, 6), Layer('b/MatMul', 10, 20, 3)]
