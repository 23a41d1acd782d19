"""The verdict on traces made by hand."""

import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import sgd, two_layers
from towers.report.chain import Link
from towers.report.parts import COMBINATION, FORWARD, INPUT, UPDATE
from towers.report.time_use import time_use
from towers.report.verdict import findings, verdict
from traces import ran, trace_of

VECTORS = samples.vectors(4)


def build(devices=2, **options):
    with tf.Graph().as_default():
        return towers.build_towers(two_layers, VECTORS, sgd(), devices, **options)


def test_the_update_while_both_towers_wait():
    use = time_use(trace_of(
        ran('/cpu:0', FORWARD, 0, 69), ran('/cpu:1', FORWARD, 0, 69), ran('/cpu:0', UPDATE, 69, 100)))
    assert verdict(build(), use, []) == [
        'The update takes 31 % of the step on /cpu:0, while both towers wait: try '
        "VariablePlacement('balanced') or VariablePlacement('replicated')."]


def test_combination_and_update_are_named_together_where_both_take_time():
    use = time_use(trace_of(
        ran('/cpu:0', FORWARD, 0, 60), ran('/cpu:0', COMBINATION, 60, 90),
        ran('/cpu:0', UPDATE, 90, 100)))
    assert verdict(build(), use, [])[0].startswith(
        'The combination of gradients and the update take 40 % of the step on /cpu:0, while both')


def test_the_advice_is_by_where_the_variables_are():
    use = time_use(trace_of(ran('/cpu:0', FORWARD, 0, 70), ran('/cpu:1', FORWARD, 0, 70),
                            ran('/cpu:0', UPDATE, 70, 100)))
    for device, advice in (('balanced', "try VariablePlacement('replicated')."),
                           ('replicated', 'so that fewer updates are made.')):
        said, = verdict(build(variables=towers.VariablePlacement(device)), use, [])
        assert said.endswith(advice)
    staged = build([['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']],
                   pipeline=towers.Pipeline(stages='auto'))
    assert any(said.endswith("try VariablePlacement('stage').") for said in verdict(staged, use, []))


def test_findings_come_by_what_they_cost():
    use = time_use(trace_of(
        ran('/cpu:0', INPUT, 0, 20), ran('/cpu:0', FORWARD, 20, 80), ran('/cpu:1', FORWARD, 20, 40),
        ran('/cpu:0', UPDATE, 80, 83), ran('/cpu:0', UPDATE, 93, 100)))
    found = findings(build(), use, [])
    assert [round(each.share, 2) for each in found] == [.2, .2, .1, .1]
    assert [each.text.split(' ')[0] for each in found] == ['the', 'tower', 'the', 'during']
    assert found[1].text == ('tower 0, on /cpu:0, computes 60 % of the step, the mean of the towers '
                             'is 40 %')


def test_waits_of_the_longest_chain():
    use = time_use(trace_of(ran('/cpu:0', FORWARD, 0, 100), ran('/cpu:1', FORWARD, 0, 100)))
    said, = verdict(build(), use, [Link(ran('/cpu:0', FORWARD, 40, 100), 40)])
    assert said.startswith('Operations of the longest chain wait for a thread or a copy during 40 %')


def test_a_step_that_only_computes():
    use = time_use(trace_of(ran('/cpu:0', FORWARD, 0, 98), ran('/cpu:1', FORWARD, 0, 97),
                            ran('/cpu:0', UPDATE, 98, 100)))
    said, = verdict(build(), use, [])
    assert said.startswith('Towers compute during 98 % of the step, and nothing else takes 5 %')
