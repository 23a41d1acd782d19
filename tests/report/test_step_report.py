"""Reports of real steps: what they say of steps that are slow for one reason."""

import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import linear, momentum
from towers.report.page import report_in
from traces import FULL, long_stage, slow_input, slow_update, traced_step

VECTORS = samples.vectors(4)


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    """(path, report, data) of a plain step of two towers."""
    path = str(tmp_path_factory.mktemp('report') / 'step.html')
    with tf.Graph().as_default():
        built = towers.build_towers(linear, VECTORS, momentum(), 2, reduction='mean',
                                    global_step=tf.train.get_or_create_global_step())
        report = towers.step_report(built, traced_step(built), path)
    return path, report, report_in(path)


def test_the_page_has_the_whole_step(plain):
    path, report, data = plain
    assert data['title'] == '2 towers on /cpu:0, /cpu:1, batch 4'
    assert [row[0] for row in data['rows'] if row[1] == 'device'] == ['/cpu:0', '/cpu:1']
    assert data['micros'] == pytest.approx(1000 * report.milliseconds)
    assert set(report.shares) == {'/cpu:0', '/cpu:1'}
    for shares in report.shares.values():
        assert 0 < sum(shares.values()) <= 1
    assert str(report).startswith('report of a step of ') and path in str(report)
    keys = [part for part, _ in data['parts']]
    parts = {keys[part] for part in data['operations']['part']}
    assert {'forward', 'backward', 'combination', 'update'} <= parts


def test_the_chain_takes_the_step_from_end_to_end(plain):
    _, _, data = plain
    spans = data['chain']['spans']
    assert spans[-1][2] == data['micros']
    total = sum(row[2] for row in data['chain']['table'])
    assert total == pytest.approx(data['micros'], rel=.02)


def test_bytes_variables_and_texts(plain):
    _, _, data = plain
    # As in test_audit: x, y and the kernel there; the kernel's gradient and the loss back.
    assert data['transfers']['devices'] == ['/cpu:0', '/cpu:1']
    assert data['transfers']['bytes'] == [[0, 288], [152, 0]]
    assert data['variables'] == [
        ['kernel', 'trained', '/cpu:0', '(6, 3)', 144, 'update'],
        ['kernel/Momentum', 'slot', '/cpu:0', '(6, 3)', 144, 'update'],
        ['global_step', 'global step', 'any', '()', 8, 'update']]
    texts = dict(data['texts'])
    assert texts['Plan'].startswith('2 towers, batch 4 = 2 x 2')
    assert 'proven' in texts['Equality with one device']
    assert 'every promise kept' in texts['Audit']
    assert 'what the runtime placed was checked' in texts['Audit']


def test_memory_is_predicted(plain):
    _, _, data = plain
    (pool,) = data['memory']['pools']
    assert pool['name'] == 'CPUs' and pool['peaks'][1] > 0
    assert max(count for _, count in pool['predicted']) == pytest.approx(pool['peaks'][1], rel=.02)


def test_a_report_beside_another(plain, tmp_path):
    before, _, data = plain
    built = towers.build_towers(linear, VECTORS, momentum(), 1)
    path = str(tmp_path / 'both.html')
    towers.step_report(built, traced_step(built), path, against=before, title='one')
    page = open(path, encoding='utf-8').read()
    assert page.count('<script type="application/json">') == 2
    assert report_in(path)['title'] == 'one' and data['title'] in page


def test_a_step_without_a_trace_is_refused(tmp_path):
    built = towers.build_towers(linear, VECTORS, momentum(), 2)
    with pytest.raises(towers.InvalidArgumentError, match='holds no operations: run the step'):
        towers.step_report(built, tf.RunMetadata(), str(tmp_path / 'step.html'))
    with pytest.raises(towers.InvalidArgumentError, match='a tf.RunMetadata'):
        towers.step_report(built, FULL, str(tmp_path / 'step.html'))


@pytest.mark.slow
def test_fifty_thousand_records_make_a_page_of_less_than_5_megabytes(tmp_path):
    built = towers.build_towers(linear, VECTORS, momentum(), 2)
    metadata = tf.RunMetadata()
    for number in range(8):
        stats = metadata.step_stats.dev_stats.add(
            device='/job:localhost/replica:0/task:0/device:CPU:%d' % number)
        for place in range(50000 // 8):
            name = ('tower_%d/InceptionResnetV2/InceptionResnetV2/Repeat_1/block17_%d/Branch_1/'
                    'Conv2d_0b_1x7/BatchNorm/FusedBatchNormV3_%d' % (number, place % 20, place))
            node = stats.node_stats.add(
                node_name=name, timeline_label='%s = FusedBatchNormV3(x, y)' % name,
                all_start_micros=1000 + 50 * place, op_end_rel_micros=40 + place % 30)
            node.memory.add(allocator_name='cpu', allocator_bytes_in_use=10 ** 9 + place)
    path = tmp_path / 'step.html'
    towers.step_report(built, metadata, str(path))
    assert len(report_in(str(path))['operations']['begin']) == 50000
    assert path.stat().st_size < 5e6


# ---- steps that are slow for one reason ----------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize('make, said', [
    # Whether the combination takes 5 % is the machine's.
    (slow_update, [
        ('The update takes ', 'The combination of gradients and the update take '),
        ' of the step on /cpu:0, while both towers wait; the longest operation is ',
        ": all variables are on /cpu:0: spread them, and the update, over the towers' devices",
        "But 'first' alone has 94 % of their bytes, and each variable is updated as a whole: "]),
    (slow_input, [
        'The input takes ', 'while both towers wait; the longest operation is IteratorGetNext, ',
        'make batches while a step runs, with dataset.map(']),
    (long_stage, [
        'Stage 0 of tower 0, on /cpu:0, computes ', 'stages of one length would compute ',
        'move layers from this stage to the others'])],
    ids=['update', 'input', 'stage'])
def test_the_verdict_names_the_reason(make, said, tmp_path):
    built, start = make()
    path = str(tmp_path / 'step.html')
    report = towers.step_report(built, traced_step(built, start=start), path)
    assert report.verdict[0].startswith(said[0]), report.verdict
    for each in said[1:]:
        assert each in report.verdict[0], report.verdict
    layers = report_in(path)['layers']
    if make is not long_stage:
        assert layers is None
        return
    assert layers['title'] == 'The layers of stage 0 of tower 0, on /cpu:0'
    assert 'move the last ones to stage 1. Times' in layers['note']
    assert sorted(row[0] for row in layers['rows'])[1].startswith('MatMul')
