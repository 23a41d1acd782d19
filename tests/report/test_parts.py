"""What each operation of a step is for, as the graph tells."""

import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import linear, momentum, sgd
from towers.report.parts import (
    BACKWARD,
    COMBINATION,
    EXCHANGE,
    FORWARD,
    INPUT,
    OTHER,
    UPDATE,
    Place,
    StepParts,
    places_in_runtime,
)

VECTORS = samples.vectors(4)


def named(places, part, kind):
    graph = tf.get_default_graph()
    return [name for name, place in places.items() if place.part == part
            and graph.get_operation_by_name(name).type == kind]


def test_parts_of_two_towers():
    built = towers.build_towers(linear, VECTORS, momentum(), 2)
    parts = StepParts(built)
    for tower in built.towers:
        for name in tower.forward:
            assert parts.places[name] == Place(FORWARD, tower.index)
        for name in tower.backward:
            assert parts.places[name] == Place(BACKWARD, tower.index)
    assert len(named(parts.places, COMBINATION, 'AddN')) == 1
    assert named(parts.places, INPUT, 'Split') or named(parts.places, INPUT, 'SplitV')
    applied = named(parts.places, UPDATE, 'ResourceApplyMomentum')
    assert len(applied) == 1
    assert not [name for name, place in parts.places.items() if place.part == EXCHANGE]
    assert parts.place_of('no/such/operation') is None
    assert parts.place_of(applied[0]).part == UPDATE


@pytest.mark.slow
def test_values_of_the_whole_batch_are_exchanged():
    def model(x, y):
        return towers.batch_mean(linear(x, y)) ** 2
    parts = StepParts(towers.build_towers(model, VECTORS, sgd(), 2, reduction='mean'))
    exchanged = [name for name, place in parts.places.items() if place.part == EXCHANGE]
    graph = tf.get_default_graph()
    # The mean of the forward pass, and the sum of its gradients in the backward pass.
    assert [graph.get_operation_by_name(name).type for name in exchanged].count('AddN') == 2


def test_workers_exchange_their_numbers_of_examples():
    batch = [tf.placeholder(each.dtype, (None,) + each.shape[1:]) for each in VECTORS]
    parts = StepParts(towers.build_towers(
        linear, tuple(batch), sgd(), 2, 'mean',
        cluster=towers.Cluster('ring', ['localhost:1', 'localhost:2'], rank=0)))
    assert len(named(parts.places, EXCHANGE, 'CollectiveReduce')) == 1


@pytest.mark.parametrize('options', [
    dict(memory=towers.Memory(accumulate=2)),
    pytest.param(dict(variables=towers.VariablePlacement('replicated')), marks=pytest.mark.slow),
    pytest.param(dict(variables=towers.VariablePlacement('balanced')), marks=pytest.mark.slow)])
def test_sums_of_gradients_are_the_combination(options):
    parts = StepParts(towers.build_towers(linear, VECTORS, sgd(), 2, **options))
    graph = tf.get_default_graph()
    sums = [name for name in parts.places if graph.get_operation_by_name(name).type == 'AddN'
            and parts.places[name].part not in (FORWARD, BACKWARD)]
    assert sums and {parts.places[name].part for name in sums} <= {COMBINATION, 'outputs'}
    assert any(parts.places[name].part == COMBINATION for name in sums)


def test_an_operation_of_the_runtime_belongs_where_all_that_take_it_belong():
    built = towers.build_towers(linear, VECTORS, sgd(), 2)
    parts = StepParts(built)
    first, second = [next(iter(sorted(tower.forward))) for tower in built.towers]
    runtime = tf.GraphDef()
    for name, inputs in (('folded', []), ('both', []), ('moved', ['both:0']),
                         (first, ['folded', 'moved']), (second, ['^both'])):
        runtime.node.add(name=name, op='Const', input=inputs)
    found = places_in_runtime(parts, [runtime])
    assert found == {'folded': Place(FORWARD, 0), 'moved': Place(FORWARD, 0)}
    assert OTHER not in {place.part for place in found.values()}
