"""The page: what it packs, how large it is, and that a browser draws it."""

import json
import random
import re
import shutil
import subprocess
import time

import pytest

import towers
from towers.report.page import packed_trace, report_in, written_page
from towers.report.parts import BACKWARD, FORWARD, UPDATE, Place
from towers.report.trace import Traced
from traces import ran, trace_of

CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')
EMPTY = dict(title='a <b> & c', subtitle='', verdict=[['Nothing', 'nothing']], facts=[], shares=[],
             chain={'table': [], 'spans': []}, memory={'pools': [], 'note': ''},
             transfers={'devices': [], 'bytes': [], 'note': ''},
             texts=[['Plan', '</script><script>alert(1)</script>']], variables=[])


def unpacked(packed):
    names, last = [], ''
    rest = packed['operations']['rest'].split('\n')
    for kept, end in zip(packed['operations']['keep'], rest):
        last = last[:kept] + end
        names.append(last)
    return names


def test_a_trace_is_packed_whole():
    packed = packed_trace(trace_of(
        ran('/cpu:0', FORWARD, 0, 10, 'net/b', 0), ran('/cpu:0', FORWARD, 5, 12, 'net/a', 0),
        ran('/cpu:1', BACKWARD, 12, 20, 'net/a', 1), ran('/cpu:0', UPDATE, 20, 25, 'Adam')))
    assert unpacked(packed) == ['Adam', 'net/a', 'net/a', 'net/b']
    operations = packed['operations']
    assert operations['begin'] == [20, 5, 12, 0] and operations['length'] == [5, 7, 8, 10]
    assert operations['lane'] == [0, 1, 0, 0] and operations['row'] == [0, 0, 1, 0]
    assert packed['rows'] == [['/cpu:0', 'device', 2], ['/cpu:1', 'device', 1]]
    assert [packed['groups'][group] for group in operations['group']] == [
        '', 'tower 0', 'tower 1', 'tower 0']
    forward, backward = [list(dict(packed['parts'])).index(part) for part in (FORWARD, BACKWARD)]
    assert [each[:2] + each[3:] for each in packed['passes']] == [
        [0, forward, 0, 12], [1, backward, 12, 20]]


def test_micro_batches_have_passes_of_their_own():
    operations = [Traced('op', 'Op', '/cpu:0', Place(FORWARD, 0, number), 10 * number,
                         10 * number + 8) for number in range(3)]
    packed = packed_trace(trace_of(*operations))
    assert packed['groups'] == ['', 'tower 0, micro-batch 0', 'tower 0, micro-batch 1',
                                'tower 0, micro-batch 2']
    assert [each[3:] for each in packed['passes']] == [[0, 8], [10, 18], [20, 28]]


def test_a_pass_that_waits_has_two_spans():
    packed = packed_trace(trace_of(
        ran('/cpu:0', FORWARD, 0, 10), ran('/cpu:0', FORWARD, 11, 20),
        ran('/cpu:0', FORWARD, 30, 40), ran('/cpu:1', FORWARD, 0, 100)))
    assert [each[3:] for each in packed['passes']] == [[0, 20], [30, 40], [0, 100]]


def test_texts_end_no_script_and_come_back(tmp_path):
    data = dict(EMPTY, **packed_trace(trace_of(ran('/cpu:0', FORWARD, 0, 10))))
    page = written_page([data])
    assert page.count('</script>') == 2 and 'alert(1)</script>' not in page
    assert '<title>a &lt;b&gt; &amp; c</title>' in page
    assert 'http' not in page.replace('http://www.w3.org', '')  # nothing is loaded
    path = tmp_path / 'page.html'
    path.write_text(page, encoding='utf-8')
    assert report_in(str(path)) == json.loads(json.dumps(data))
    path.write_text('<html></html>')
    with pytest.raises(towers.BadFileError, match='has no report of a step in it'):
        report_in(str(path))
    with pytest.raises(towers.BadFileError, match='cannot be read'):
        report_in(str(tmp_path / 'none.html'))


def large_trace(count=50000):
    """As of InceptionResNet on 8 towers: long names, and several operations at a time."""
    chance = random.Random(1)
    operations = []
    for number in range(count):
        tower = number % 8
        name = ('tower_%d/InceptionResnetV2/InceptionResnetV2/Repeat_1/block17_%d/Branch_%d/'
                'Conv2d_0b_1x7/BatchNorm/FusedBatchNormV3_grad/op_%d' % (
                    tower, number % 20, number % 3, number))
        begin = number // 8 * 30
        part = FORWARD if number < count // 3 else BACKWARD
        operations.append(ran('/gpu:%d' % tower, part, begin, begin + chance.randrange(5, 180),
                              name, tower))
    return trace_of(*operations)


@pytest.mark.slow
def test_fifty_thousand_operations_take_less_than_5_megabytes():
    begin = time.process_time()
    page = written_page([dict(EMPTY, **packed_trace(large_trace()))])
    assert len(page.encode()) < 5e6 / 2
    assert time.process_time() - begin < 20


HOVER = '''<script>
const {canvas, tops} = shown[0], box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new PointerEvent('pointermove', {
  clientX: box.left + 1, clientY: box.top + tops[0].lanes + 5}));
</script>'''


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason='no Chromium here')
@pytest.mark.parametrize('count', [1, 2])
def test_a_browser_draws_it(tmp_path, count):
    data = dict(EMPTY, **packed_trace(large_trace()))
    path = tmp_path / 'page.html'
    path.write_text(written_page([data] * count) + HOVER, encoding='utf-8')
    drawn = subprocess.run(
        [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--dump-dom',
         '--virtual-time-budget=20000', 'file://%s' % path],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout.decode()
    assert int(re.search(r'data-drawn="(\d+)"', drawn).group(1)) < 8000  # on a busy machine
    assert drawn.count('<h1>a &lt;b&gt; &amp; c</h1>') == count
    assert re.search(r'class="hover">tower_0/Incep.*forward pass.*tower 0.*/gpu:0.* ms from', drawn)
    assert drawn.count('</canvas>') == count + 1  # and that of the template


# The widths of a page, and the tables in it whose rows are shown as lines, as a phone lays it out.
LAID_OUT = '''<script>
document.documentElement.dataset.widths = [
  document.documentElement.scrollWidth, innerWidth,
  ...Array.from(document.querySelectorAll('main .scroll, main pre'),
                each => each.scrollWidth - each.clientWidth)].join(' ');
document.documentElement.dataset.rows = Array.from(
  document.querySelectorAll('.shares tbody tr'), each => each.offsetHeight > 40 ? 2 : 1).join(' ');
document.documentElement.dataset.lines = Array.from(
  document.querySelectorAll('main section'),
  each => each.querySelector('.lines') ? each.className : '').filter(Boolean).join(' ');
</script>'''


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason='no Chromium here')
@pytest.mark.parametrize('width, lines', [(1280, ''), (390, 'layers chain variables')])
def test_nothing_on_a_page_is_wider_than_the_page(tmp_path, width, lines):
    scope = 'InceptionResnetV2/Repeat_1/block17_3/Branch_1/Conv2d_0b_1x7/BatchNorm/'
    data = dict(
        EMPTY, **packed_trace(trace_of(ran('/cpu:0', FORWARD, 0, 10))),
        verdict=[["Try variables=towers.VariablePlacement('balanced')", scope]],
        shares=[['/cpu:0', [1, 2]], ['/cpu:1', [3, 4]]],
        layers={'title': 'The layers of stage 1', 'note': scope, 'rows': [
            [scope + 'FusedBatchNormV3', 1234567, 2345678, 100], ['', 10, 20, 3]]},
        chain={'table': [[1, '/cpu:0', 10, 1, scope + 'FusedBatchNormV3']], 'spans': []},
        texts=[['Plan', 'one device  ' + 'proven ' * 50]],
        variables=[[scope + 'moving_mean', 'trained', '/cpu:0', '(1, 7, 128, 160)', 4000, 'update']])
    frame = tmp_path / 'frame.html'
    frame.write_text(written_page([data]) + LAID_OUT, encoding='utf-8')
    # The window of a headless browser has a least width; a frame has none.
    page = tmp_path / 'page.html'
    page.write_text('<iframe src="frame.html" width="%d" height="900" style="border: 0"></iframe>'
                    '<script>onload = () => { document.body.textContent = JSON.stringify('
                    'frames[0].document.documentElement.dataset) }</script>' % width)
    drawn = subprocess.run(
        [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--dump-dom',
         '--allow-file-access-from-files', '--virtual-time-budget=20000',
         '--window-size=1400,900', 'file://%s' % page],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout.decode()
    laid_out = json.loads(re.search(r'{.*}', drawn).group())
    page_width, window_width, *excess = map(int, laid_out['widths'].split())
    assert page_width <= window_width == width
    assert set(excess) == {0} and laid_out['lines'] == lines
    assert set(laid_out['rows'].split()) == {'1'}  # figures are not broken
