"""towers.api.options: arguments that travel together, and the keywords that stand for them."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.api import request
from sample_models import sgd, slope

BATCH = np.arange(4.)


def build(**options):
    with tf.Graph().as_default():
        return towers.build_towers(slope, BATCH, sgd(), 2, **options)


def test_a_group_and_its_keywords_say_the_same():
    grouped = build(numerics=towers.Numerics(check_numerics=True, loss_scale=towers.LossScale(8.)),
                    variables=towers.VariablePlacement('replicated', 'copy'))
    single = build(check_numerics=True, loss_scale=towers.LossScale(8.),
                   variable_device='replicated', all_reduce='copy')
    for built in (grouped, single):
        assert built.placement.all_reduce == 'copy'
        assert built.plan.loss_scale and built.scaled_losses is not None
        assert len(built.replicas.variables) == 1
    assert str(grouped.plan) == str(single.plan)
    names = [[op.name for op in built.train_op.graph.get_operations()]
             for built in (grouped, single)]
    assert names[0] == names[1]


@pytest.mark.parametrize('options, text', [
    (dict(numerics=towers.Numerics(), precision='bf16'),
     'numerics= and precision= were both given: put the latter into the Numerics'),
    (dict(numerics=towers.Numerics(), xla=True), 'numerics= and xla= were both given'),
    (dict(variables=towers.VariablePlacement(), variable_device='/cpu:0'),
     'variables= and variable_device= were both given'),
    (dict(numerics='fp16'), "numerics='fp16': expected a Numerics"),
    (dict(numerics=towers.Numerics(precision='int8')), "precision='int8': expected one of"),
    (dict(variable_devices='/cpu:0'), 'no variable_devices=: did you mean variable_device='),
    (dict(zzz=1), 'build_towers takes no zzz='),
    (dict(uneven=True), r'takes no uneven=, .* cluster=towers.Cluster\(…, uneven=…\)')])
def test_what_is_refused(options, text):
    with tf.Graph().as_default() as graph:
        with pytest.raises(towers.InvalidArgumentError, match=text):
            towers.build_towers(slope, BATCH, sgd(), 2, **options)
        assert not graph.get_operations()


def test_what_comes_after_the_reduction_goes_by_its_name():
    with pytest.raises(towers.InvalidArgumentError, match="such as remainder='weight'"):
        towers.build_towers(slope, BATCH, sgd(), 2, 'mean', 'weight')


def test_what_is_known_of_a_clusters_arguments():
    assert request._OF_CLUSTER == towers.Cluster._fields
