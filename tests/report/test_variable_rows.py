"""The variables of a build: roles, devices, sizes, writers."""

import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import linear, momentum, sgd
from towers.report.parts import StepParts
from towers.report.variable_rows import variable_rows

VECTORS = samples.vectors(4)


def rows_of(model, optimizer, **options):
    built = towers.build_towers(model, VECTORS, optimizer, 2, **options)
    return [tuple(row) for row in variable_rows(built, StepParts(built))]


def test_trained_variables_and_slots_are_written_by_the_update():
    assert rows_of(linear, momentum()) == [
        ('kernel', 'trained', '/cpu:0', '(6, 3)', 144, 'update'),
        ('kernel/Momentum', 'slot', '/cpu:0', '(6, 3)', 144, 'update')]


def test_replicas_are_on_their_towers():
    rows = rows_of(linear, sgd(), variables=towers.VariablePlacement('replicated'))
    assert [row[1:3] for row in rows] == [('trained', '/cpu:0'), ('replica', '/cpu:1')]
    assert [row[5] for row in rows] == ['update', 'update']


def test_states_of_towers_and_what_nobody_writes():
    def model(x, y):
        calls = tf.get_variable('calls', [], tf.float64, tf.zeros_initializer(), trainable=False,
                                collections=[tf.GraphKeys.LOCAL_VARIABLES], use_resource=True)
        scale = tf.get_variable('scale', [], tf.float64, tf.ones_initializer(), trainable=False)
        with tf.control_dependencies([calls.assign_add(1.)]):
            return linear(x, y) * scale
    rows = {row[0]: row[1:] for row in rows_of(model, sgd())}
    assert rows['calls'] == ('state of a tower', '/cpu:0', '()', 8, 'tower 0')
    assert rows['scale'][0] == 'shared' and rows['scale'][4] == 'nobody in a step'
    states = [row for row in rows.values() if row[0] == 'state of a tower']
    assert [row[4] for row in states] == ['tower 0', 'tower 1']
