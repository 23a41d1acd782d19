"""`train.py` that goes on with other files than it was stopped with: what it says and lists."""

import json

import pytest

from image_files import jpeg, write_folder, write_records
from train_runs import metrics

# Gives the digits' network three channels, as these images have.
THREE_CHANNELS = ('from models import registry\n'
                  'network = registry.get_network("digits")\n'
                  'registry.get_network = lambda name: network._replace(default_channels=3)\n')
FLAGS = ['--model=digits', '--image_size=8', '--batch_size=4', '--log_every=1', '--summary_steps=0',
         '--augment=crop', '--skip_bad=9']


def train(runner, folder, steps, *flags):
    return runner.run(folder, FLAGS + ['--train_steps=%d' % steps] + list(flags),
                      before=THREE_CHANNELS).stdout


def listed(folder):
    with open(str(folder / 'skipped_examples.jsonl')) as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.version_independent
def test_a_shard_that_is_back_is_another_run_and_is_said(runner, tmp_path):
    data, run = tmp_path / 'data', tmp_path / 'run'
    data.mkdir()
    for shard in range(3):
        write_records(data / ('train-%05d-of-00003' % shard), [
            (jpeg(9 * number), number % 2) for number in range(4)])
    write_records(data / 'validation-00000-of-00001', [(jpeg(), 0)])
    shard, kept = data / 'train-00001-of-00003', tmp_path / 'kept'
    shard.rename(kept)
    flags = ['--dataset=tfrecords', '--data_dir=%s' % data, '--num_classes=2']
    said = train(runner, run, 3, *flags)
    assert 'skipped        1 damaged file ' in said
    missing, = listed(run)
    assert missing['number'] is None and '%s. Copy it again.' % shard in missing['text']
    assert 'number of training' not in train(runner, run, 4, *flags) and listed(run) == [missing]
    kept.rename(shard)
    said = train(runner, run, 5, *flags).splitlines()
    place = said.index('going on from %s/model.ckpt-4' % run)
    assert said[place + 2] == (
        'number of training examples: 12, was 8: other examples in another order from here on, not '
        'the run that it would be without a stop')
    assert listed(run) == []
    assert [round(line['epoch'], 3) for line in metrics(run) if 'loss' in line] == [
        .5, 1, 1.5, 2, 1.667]
    with open(str(run / 'settings.json')) as opened:
        changes = [(each['step'], each['from'], each['to'])
                   for each in json.load(opened)['changes'] if 'number' in each['setting']]
    assert changes == [(4, 8, 12)]


@pytest.mark.slow
@pytest.mark.version_independent
def test_what_a_run_left_out_in_a_folder_that_is_moved_and_changed(runner, tmp_path):
    write_folder(tmp_path / 'here', {
        '%s/%s/%d.jpg' % (split, name, number):
        b'' if (split, name) == ('train', 'b') and number in (1, 3) else jpeg(40 * number)
        for split in ('train', 'test') for name in 'ab' for number in range(5)})
    run, data = tmp_path / 'run', tmp_path / 'there'
    train(runner, run, 3, '--dataset=folder', '--data_dir=%s' % (tmp_path / 'here'))
    assert sorted(bad['text'] for bad in listed(run)) == [
        '%s/here/train/b/%d.jpg is empty' % (tmp_path, number) for number in (1, 3)]
    (tmp_path / 'here').rename(data)
    (data / 'train/b/3.jpg').write_bytes(b'GIF89a')
    flags = ['--dataset=folder', '--data_dir=%s' % data]
    said = train(runner, run, 5, *flags)
    now = ['%s/train/b/1.jpg is empty' % data,
           "%s/train/b/3.jpg is neither a JPEG nor a PNG: it begins with b'GIF89a'" % data]
    assert sorted(bad['text'] for bad in listed(run)) == now
    assert sorted(said[said.index('skipped  '):].splitlines()[1:3]) == ['  ' + text for text in now]
    assert 'used again' not in said and 'forgotten' not in said
    (data / 'train/a/0.jpg').unlink()  # a good one: those after it have other numbers
    said = train(runner, run, 6, *flags)
    assert 'used again' not in said
    lines = said.splitlines()
    place = [line.partition(' that the run left')[0] for line in lines].index(
        'forgotten      2 examples')
    assert sorted(lines[place + 1:place + 3]) == [
        '  %s: that is no longer example %d' % each for each in zip(now, (6, 8))]
    assert 'number of training examples: 9, was 10: other examples in another order ' in said
