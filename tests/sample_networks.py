"""Networks of models/ with fewer of the blocks that they repeat, which build in a part of the time.

Every layer that a network makes outside of its repeated blocks is there, and so are the first and
the last block of each kind, with the names that they have.
"""

from tf_slim.nets import resnet_v1, resnet_v2

from models import inception_resnet_v2

FULL = {  # how often each network repeats its blocks
    'inception_resnet_v2': [10, 20, 9],
    'resnet_v1_50': [3, 4, 6, 3], 'resnet_v1_101': [3, 4, 23, 3],
    'resnet_v1_152': [3, 8, 36, 3], 'resnet_v1_200': [3, 24, 36, 3],
    'resnet_v2_50': [3, 4, 6, 3], 'resnet_v2_101': [3, 4, 23, 3],
    'resnet_v2_152': [3, 8, 36, 3], 'resnet_v2_200': [3, 24, 36, 3]}


def fewer_blocks(monkeypatch, most=2):
    """Returns a list that each network, as it is built, appends its full numbers of blocks to."""
    asked = []

    def fewer(times):
        asked.append(times)
        return min(times, most)
    repeat = inception_resnet_v2._repeat
    monkeypatch.setattr(
        inception_resnet_v2, '_repeat', lambda net, scope, times, *args, **kwargs:
        repeat(net, scope, fewer(times), *args, **kwargs))
    for module, name in ((resnet_v1, 'resnet_v1_block'), (resnet_v2, 'resnet_v2_block')):
        def block(scope, base_depth, num_units, stride, make=getattr(module, name)):
            return make(scope, base_depth, fewer(num_units), stride)
        monkeypatch.setattr(module, name, block)
    return asked
