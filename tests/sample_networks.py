"""Networks of models/ with fewer of the blocks that they repeat, for one test."""

from benchmarks.small_networks import replacements

FULL = {  # how often each network repeats its blocks
    'inception_resnet_v2': [10, 20, 9],
    'resnet_v1_50': [3, 4, 6, 3], 'resnet_v1_101': [3, 4, 23, 3],
    'resnet_v1_152': [3, 8, 36, 3], 'resnet_v1_200': [3, 24, 36, 3],
    'resnet_v2_50': [3, 4, 6, 3], 'resnet_v2_101': [3, 4, 23, 3],
    'resnet_v2_152': [3, 8, 36, 3], 'resnet_v2_200': [3, 24, 36, 3]}


def fewer_blocks(monkeypatch, most=2):
    """Returns a list that each network, as it is built, appends its full numbers of blocks to."""
    asked = []
    for replacement in replacements(most, asked):
        monkeypatch.setattr(*replacement)
    return asked
