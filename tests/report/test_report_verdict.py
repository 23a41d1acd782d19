"""The verdict on traces made by hand."""

import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import sgd, two_layers
from towers.report.chain import Link
from towers.report.parts import COMBINATION, FORWARD, INPUT, UPDATE
from towers.report.time_use import time_use
from towers.report.verdict import verdict
from traces import batch, build as build_of, dense, ran, trace_of
import pytest

VECTORS = samples.vectors(4)


def build(devices=2, **options):
    with tf.Graph().as_default():
        return towers.build_towers(two_layers, VECTORS, sgd(), devices, **options)


def test_the_update_while_both_towers_wait():
    use = time_use(trace_of(
        ran('/cpu:0', FORWARD, 0, 69), ran('/cpu:1', FORWARD, 0, 69), ran('/cpu:0', UPDATE, 69, 100)))
    said, = verdict(build(), use, [])
    assert str(said) == (
        'The update takes 31 % of the step on /cpu:0, while both towers wait; the longest operation '
        'is op, 0.03 ms: all variables are on /cpu:0: spread them, and the update, over the '
        "towers' devices with variables=towers.VariablePlacement('balanced') or "
        "VariablePlacement('replicated').")


def test_combination_and_update_are_named_together_where_both_take_time():
    use = time_use(trace_of(
        ran('/cpu:0', FORWARD, 0, 60), ran('/cpu:0', COMBINATION, 60, 90),
        ran('/cpu:0', UPDATE, 90, 100)))
    assert verdict(build(), use, [])[0].text.startswith(
        'The combination of gradients and the update take 40 % of the step on /cpu:0, while both')


@pytest.mark.slow
def test_the_advice_is_by_where_the_variables_are():
    use = time_use(trace_of(ran('/cpu:0', FORWARD, 0, 70), ran('/cpu:1', FORWARD, 0, 70),
                            ran('/cpu:0', UPDATE, 70, 100)))
    for device, advice in (('balanced', "try variables=towers.VariablePlacement('replicated')"),
                           ('replicated', 'so that fewer updates are made')):
        said, = verdict(build(variables=towers.VariablePlacement(device)), use, [])
        assert said.advice.endswith(advice)
    staged = build([['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']],
                   pipeline=towers.Pipeline(stages='auto'))
    assert any(said.advice.endswith("VariablePlacement('stage')")
               for said in verdict(staged, use, []))


def test_a_variable_that_no_placement_divides_is_named():
    use = time_use(trace_of(ran('/cpu:0', FORWARD, 0, 70), ran('/cpu:1', FORWARD, 0, 70),
                            ran('/cpu:0', UPDATE, 70, 100)))
    with tf.Graph().as_default():
        said, = verdict(build_of(dense(16, 10), batch(2, 16)), use, [])
    assert "VariablePlacement('replicated'). But 'first' alone has 94 % of their bytes" in said.advice
    with tf.Graph().as_default():
        said, = verdict(build_of(dense(1, 10), batch(2, 1)), use, [])  # two variables of one size
    assert said.advice.endswith("VariablePlacement('replicated')")


def test_an_evaluation_has_a_verdict():
    use = time_use(trace_of(ran('/cpu:0', INPUT, 0, 70), ran('/cpu:1', FORWARD, 70, 100)))
    with tf.Graph().as_default():
        built = towers.build_towers(two_layers, VECTORS, None, 2)
    assert verdict(built, use, [])[0].text.startswith('The input takes 70 %')


def test_findings_come_by_what_they_cost():
    use = time_use(trace_of(
        ran('/cpu:0', INPUT, 0, 20), ran('/cpu:0', FORWARD, 20, 80, tower=0),
        ran('/cpu:1', FORWARD, 20, 40, tower=1),
        ran('/cpu:0', UPDATE, 80, 83), ran('/cpu:0', UPDATE, 93, 100)))
    found = verdict(build(), use, [])
    assert [round(each.share, 2) for each in found] == [.2, .2, .1, .1]
    assert [each.text.split(' ')[0] for each in found] == ['The', 'Tower', 'The', 'During']
    assert found[1].text == ('Tower 0, on /cpu:0, computes 60 % of the step, the mean of the towers '
                             'is 40 %')


def test_a_long_stage_is_named_with_its_tower_where_other_towers_share_devices():
    stages = [['/cpu:0', '/cpu:1'], ['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']]
    devices = towers.resolve_devices(stages, allow_repeated=True)
    use = time_use(trace_of(ran('/cpu:2', FORWARD, 0, 90), ran('/cpu:3', FORWARD, 90, 100)))
    said, = verdict(build()._replace(devices=devices), use, [])
    assert said.text.startswith('Stage 0 of tower 2, on /cpu:2, computes 90 % of the step, and the '
                                'other stage only 10 %; stages of one length would compute 50 %')


def test_waits_of_the_longest_chain():
    use = time_use(trace_of(ran('/cpu:0', FORWARD, 0, 100), ran('/cpu:1', FORWARD, 0, 100)))
    waiting = ran('/cpu:0', FORWARD, 60, 100)
    said, = verdict(build(), use, [Link(waiting, 60, 40)])
    assert said.text.startswith('During 40 % of the step the next operation of the longest chain '
                                'waits on an idle device for a processor')
    said, = verdict(build(), use, [Link(waiting, 60, 0)])  # its device ran something else
    assert said.text.startswith('Towers compute')


def test_waits_for_threads_that_cpus_share_come_last():
    use = time_use(trace_of(ran('/cpu:0', FORWARD, 0, 90), ran('/cpu:0', UPDATE, 90, 100)))
    found = verdict(build(), use, [Link(ran('/cpu:0', UPDATE, 90, 100), 50, 50)])
    assert [round(each.share, 2) for each in found] == [.1, .5]


def test_a_step_that_only_computes():
    use = time_use(trace_of(ran('/cpu:0', FORWARD, 0, 98), ran('/cpu:1', FORWARD, 0, 97),
                            ran('/cpu:0', UPDATE, 98, 100)))
    said, = verdict(build(), use, [])
    assert said.text.startswith('Towers compute during 98 % of the step, and nothing else takes 5 %')
