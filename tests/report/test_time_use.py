"""Where the time goes, by traces made by hand."""

import pytest

from towers.report.parts import BACKWARD, COMBINATION, FORWARD, INPUT, UPDATE
from towers.report.time_use import length, time_use, union
from traces import ran, trace_of


def test_spans_that_overlap_count_once():
    assert union([(5, 7), (0, 3), (2, 4)]) == [(0, 4), (5, 7)]
    assert length(union([(0, 3), (2, 4), (5, 7)])) == 6


def test_parts_that_run_at_the_same_time_share_it():
    use = time_use(trace_of(
        ran('/cpu:0', FORWARD, 0, 10), ran('/cpu:0', FORWARD, 2, 8), ran('/cpu:0', UPDATE, 6, 14),
        ran('/cpu:1', FORWARD, 0, 20)))
    assert use.shares['/cpu:0'] == {FORWARD: 8., UPDATE: 6.}
    assert use.busy('/cpu:0') == 14 and use.busy('/cpu:1') == 20
    assert use.computing == {'/cpu:0': 10, '/cpu:1': 20}


def test_a_tower_computes_where_any_of_its_stages_does():
    use = time_use(trace_of(
        ran('/cpu:0', FORWARD, 0, 10, tower=0), ran('/cpu:1', BACKWARD, 5, 12, 'long', tower=0),
        ran('/cpu:1', BACKWARD, 14, 15, tower=0), ran('/cpu:2', FORWARD, 0, 3, tower=1)))
    assert use.tower_micros == {0: 13, 1: 3}
    assert use.longest['/cpu:1'][BACKWARD].name == 'long'


def test_exposed_is_what_ran_while_no_tower_computed():
    use = time_use(trace_of(
        ran('/cpu:0', INPUT, 0, 10), ran('/cpu:0', FORWARD, 10, 20),
        ran('/cpu:1', FORWARD, 15, 40), ran('/cpu:0', UPDATE, 30, 50)))
    assert use.exposed == {INPUT: 10., UPDATE: 10.}
    assert use.nothing == 0


def test_time_in_which_nothing_runs():
    use = time_use(trace_of(ran('/cpu:0', FORWARD, 0, 10), ran('/cpu:0', FORWARD, 30, 40)))
    assert use.nothing == 20 and use.micros == 40


@pytest.mark.parametrize('begin, end, share', [(0, 10, 1.), (15, 25, .5), (20, 30, 0.)])
def test_the_combination_hides_behind_the_last_backward_pass(begin, end, share):
    use = time_use(trace_of(
        ran('/cpu:0', BACKWARD, 0, 12), ran('/cpu:1', BACKWARD, 0, 20),
        ran('/cpu:0', COMBINATION, begin, end)))
    assert use.hidden == share


def test_nothing_is_hidden_without_a_combination():
    assert time_use(trace_of(ran('/cpu:0', BACKWARD, 0, 12))).hidden is None
