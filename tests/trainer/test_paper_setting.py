"""The paper's own setting: 4 x 100 images of 224 x 224 x 3, 1001 classes, at 0.002."""

import re

import pytest

from image_files import write_imagenet
import pages


# The network with one block in the place of several.
ONE_BLOCK = '''
from models import inception_resnet_v2 as module
repeat = module._repeat
module._repeat = lambda net, scope, times, *more, **named: repeat(net, scope, 1, *more, **named)
'''


@pytest.mark.slow
def test_the_commands_of_the_page_run_on_small_records(runner, tmp_path):
    """As pasted, 4 x 100 shows its plan; with fewer and smaller images and blocks, 1 x 100 trains.
    """
    folder = tmp_path / 'imagenet'
    folder.mkdir()
    write_imagenet(folder)
    one, four = [
        command.replace('/data/imagenet', str(folder)).split()[2:]
        for block in pages.blocks('docs/training.md', 'console')
        for command, _ in pages.commands(block) if 'inception_resnet_v2' in command]
    shown = runner.run(tmp_path / 'plan', four + ['--plan_only']).stdout
    assert shown.startswith('4 towers, batch 400 = 4 x 100\n')
    assert 'audit: every promise kept' in shown
    # docs/scaling.md shows a part of the same plan.
    given, printed = re.search(r'train.py --plan_only( --dataset=imagenet[^…]*)(.*?)```',
                               pages.text('docs/scaling.md'), re.S).groups()
    given = given.replace('\\\n', ' ').replace('/data/imagenet', str(folder)).split()
    assert set(given) == set(four) | {'--base_learning_rate=0.001'}  # the default
    assert set(printed.splitlines()) <= set(shown.splitlines()) | {'', '…'}, shown
    run = runner.run(tmp_path / 'run', one + [
        '--image_size=75', '--batch_size=1', '--train_steps=2', '--log_every=1',
        '--summary_steps=0', '--config={"aux_loss_weight": 0}'], before=ONE_BLOCK)
    assert re.search(r'^step 2/2 .* lr 0.001 ', run.stdout, re.M), run.stdout
    assert re.search(r'^test top_5_accuracy \d', run.stdout, re.M)
