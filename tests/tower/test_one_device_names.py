"""towers.models_names: names as the model has them on one device."""

import pytest
import tensorflow.compat.v1 as tf

from towers.tower.one_device_names import ModelsNames


@pytest.fixture
def tower(graph):
    """A tower within scope 'train', with the operations 'mean' and 'layer/mean'."""
    with tf.name_scope('train/tower_0/'):
        tf.constant(1., name='mean')
        tf.constant(1., name='layer/mean')
    return ModelsNames(graph, 'train/tower_0/', 'train/', 'train/', {'train/tower_0/w'})


@pytest.mark.parametrize('text, expected', [
    ('train/tower_0/mean/average', 'train/mean/average'),
    ('train/tower_0/layer/mean_average', 'train/layer/mean_average'),
    ('train/tower_0/average', 'train/average'),
    ('stats/train/tower_0/mean', 'stats/train/mean'),
    ('stats/train/tower_0/other', 'stats/train/tower_0/other'),
    ('train_tower_0_layer_mean_average', 'train_layer_mean_average'),
    ('of.train.tower_0.layer.mean', 'of.train.layer.mean'),
    ('train_tower_0_other', 'train_tower_0_other'),
    ('retrain_tower_0_mean', 'retrain_tower_0_mean'),
    ('train_tower_0_meanwhile', 'train_tower_0_meanwhile'),
    ('tower_0/mean', 'tower_0/mean'), ('mean', 'mean')])
def test_the_towers_scope_is_taken_out(tower, text, expected):
    assert tower.without_tower(text) == expected


def test_a_tower_without_a_scope_of_its_own(graph):
    tf.constant(1., name='train/mean')
    names = ModelsNames(graph, 'train/', 'train/', 'train/', set())
    assert names.without_tower('train/mean') == 'train/mean'


def test_a_scope_of_the_models_own(graph):
    names = ModelsNames(graph, 'tower_0/', '', '', {'tower_0/w'})
    tf.get_variable('tower_0/w', [])
    assert names.without_tower('tower_0/w') == 'w'
    with tf.name_scope('tower_0/'), tf.variable_scope('tower_0'):
        assert names.without_tower('tower_0/w') == 'tower_0/w'
