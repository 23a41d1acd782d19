"""towers.api.options: arguments that travel together, and check themselves."""

import inspect

import numpy as np
import pytest
from case_marks import first_fast

import towers
from sample_models import sgd, slope
from towers.api.checked_request import checked_request

BATCH = np.arange(4.)


def build(*given, **options):
    return towers.build_towers(slope, BATCH, sgd(), 2, *given, **options)


def test_what_they_say_is_built(graph):
    built = build(numerics=towers.Numerics(check_numerics=True, loss_scale=towers.LossScale(8.)),
                  variables=towers.VariablePlacement('replicated'))
    assert built.placement.has_replicas and len(built.replicas.variables) == 1
    assert built.plan.line('loss scale') and built.scaled_losses is not None


@pytest.mark.parametrize('make, text', [
    (lambda: build(numerics='fp16'), "numerics='fp16' of type str: expected a towers.Numerics, or"),
    (lambda: build(variables='balanced'),
     "variables='balanced' of type str: expected a towers.VariablePlacement, or None."),
    (lambda: build(variables=towers.VariablePlacement), 'or None, not the class'),
    (lambda: build(memory=4), 'memory=4 of type int: expected a towers.Memory, or None'),
    (lambda: towers.Memory(0), 'accumulate=0: expected a whole number of at least 1'),
    (lambda: towers.Memory(2.), 'accumulate=2.0: expected a whole number'),
    (lambda: towers.Memory(True), 'accumulate=True'),
    (lambda: towers.Memory(recompute='all'), "recompute='all': expected 'auto', a list of names"),
    (lambda: towers.Memory(recompute=[]), 'recompute=\\[\\]'),
    (lambda: towers.Memory(recompute=['a3', 4]), "recompute=\\['a3', 4\\]"),
    (lambda: towers.Pipeline(0), 'micro_batches=0'),
    (lambda: towers.Pipeline(schedule='gpipe'), "schedule='gpipe'"),
    (lambda: towers.Pipeline(stages=2), 'stages=2'),
    (lambda: towers.Numerics('int8'), "precision='int8': expected one of"),
    (lambda: towers.Numerics(xla=1), 'xla=1: expected True or False'),
    (lambda: towers.Numerics(check_numerics='no'), "check_numerics='no': expected True or False")])
def test_what_is_refused(graph, make, text):
    with pytest.raises(towers.InvalidArgumentError, match=text):
        make()
    assert not graph.get_operations()


def test_the_check_takes_the_arguments_of_a_build():
    expected = set(inspect.signature(towers.build_towers).parameters) - {'inputs'}
    assert set(inspect.signature(checked_request).parameters) == expected


@pytest.mark.parametrize('kind, rank, updates_here', first_fast(2, [
    ('ring', 1, True), ('ps', 1, False), ('ps', 0, True), (None, 0, True)]))
def test_who_updates_the_variables(graph, kind, rank, updates_here):
    """On parameter servers the chief alone updates them."""
    cluster = kind and towers.Cluster(kind, ['a:1', 'b:1'], ['c:1'] if kind == 'ps' else (),
                                      rank=rank)
    assert build(cluster=cluster).updates_here is updates_here
