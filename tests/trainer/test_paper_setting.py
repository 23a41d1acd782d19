"""The paper's own setting: 4 x 100 images of 224 x 224 x 3, 1001 classes, at 0.002."""

import os
import re

from absl.testing import flagsaver
import pytest
import tensorflow.compat.v1 as tf

from benchmarks.batch_scaling import __main__ as scaling
from benchmarks.batch_scaling.arms import make_arms, train_flags
import datasets
from image_files import write_imagenet
import pages
import towers
from trainer.command_line import parse_flags
from trainer.flags import FLAGS
from trainer.job import build_job, make_setup

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture
def command(tmp_path):
    """The command of docs/scaling.md, with a folder of a few images instead of ImageNet."""
    write_imagenet(tmp_path)
    with open(os.path.join(ROOT, 'docs', 'scaling.md')) as page:
        found = re.search(r"make scaling ARGS='([^']*--dataset=imagenet[^']*)'", page.read())
    flags = found.group(1).replace('\\\n', ' ').split()
    assert '--data_dir=/data/imagenet' in flags
    return [flag for flag in flags if not flag.startswith('--data_dir')] + [
        '--data_dir=%s' % tmp_path]


def flags_of(command, name):
    """The flags of train.py in that arm."""
    settings = scaling.make_settings(scaling.parse(command))
    arm, = make_arms(settings, [name])
    return train_flags(settings, arm, 1)


@pytest.mark.slow
def test_graph_and_plan_of_the_claim(command):
    towers.mend_slim()
    flags = flags_of(command, 'sqrt')
    with flagsaver.flagsaver():
        FLAGS.unparse_flags()
        parse_flags(['train.py'] + flags)
        dataset = datasets.get_dataset(FLAGS.dataset, FLAGS.data_dir)
        setup = make_setup(dataset)
        job = build_job(setup, with_evaluation=False)
    plan = str(job.built.plan)
    assert plan.startswith('4 towers, batch 400 = 4 x 100\n')
    # The command of the page cannot run as pasted: it takes ImageNet.
    shown, = re.findall(r'train.py --plan_only( --dataset=imagenet.*?)```',
                        pages.text('docs/scaling.md'), re.S)
    given, _, printed = shown.partition('…')
    given = set(given.replace('\\\n', ' ').split()) - {'--data_dir=/data/imagenet'}
    assert given and given <= set(flags)
    assert set(printed.splitlines()) <= set(plan.splitlines()) | {'', '…'}, plan
    logits = [v for v in job.built.variables if v.op.name.endswith('/Logits/Logits/weights')
              or v.op.name.endswith('/Logits/weights')]
    assert [1001] * len(logits) == [v.shape.as_list()[-1] for v in logits] and len(logits) == 2
    stem = next(op for op in tf.get_default_graph().get_operations()
                if op.type == 'Conv2D' and op.name.startswith('tower_3/'))
    assert stem.inputs[0].shape.as_list() == [100, 224, 224, 3]
    assert stem.device == '/device:CPU:3' or 'GPU:3' in stem.device
    assert not towers.audit(job.built).broken


@pytest.mark.slow
@pytest.mark.parametrize('number, plan, rate', [(0, '1 tower, batch 100 = 1 x 100\n', '0.001\n'),
                                                (1, '4 towers, batch 400 = 4 x 100\n',
                                                 '0.002 = 0.001 x sqrt(4)\n')])
def test_the_commands_of_the_page_run_on_small_records(runner, tmp_path, number, plan, rate):
    """As pasted they show their plan; with fewer and smaller images they train."""
    folder = tmp_path / 'imagenet'
    folder.mkdir()
    write_imagenet(folder)
    commands = [command for block in pages.blocks('docs/training.md', 'console')
                for command, _ in pages.commands(block) if 'inception_resnet_v2' in command]
    flags = [flag for flag in commands[number].split()[2:] if '/data/imagenet' not in flag] + [
        '--data_dir=%s' % folder]
    shown = runner.run(tmp_path / 'plan', flags + ['--plan_only']).stdout
    assert shown.startswith(plan) and '  learning rate    ' + rate in shown
    towers_and_batch = int(plan[0])
    run = runner.run(tmp_path / 'run', flags + [
        '--image_size=75', '--batch_size=%d' % towers_and_batch, '--train_steps=2', '--log_every=1',
        '--summary_steps=0', '--config={"aux_loss_weight": 0}'])
    assert re.search(r'^step 2/2 .* lr %s ' % rate.split()[0], run.stdout, re.M), run.stdout
    assert re.search(r'^test top_5_accuracy \d', run.stdout, re.M)
