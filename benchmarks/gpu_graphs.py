"""Graphs for GPUs, checked on a machine that has none: every network in every mode.

    python -m benchmarks.gpu_graphs                    all of them, for 2 and for 8 GPUs: hours
    python -m benchmarks.gpu_graphs --seconds=400      begins no further build after 400 seconds
    python -m benchmarks.gpu_graphs --networks=digits,bert --modes=sync,stages --towers=2

No step is run. Of each build it is checked, by `towers.audit` and what the build returns, that

- no operation lacks a GPU kernel, but for those that the network is known to have;
- variables, slots and the operations of each tower are on the devices of the plan, and the sum of a
  variable's gradients is where the variable is;
- the bytes that cross between devices in a step are those of the formula: of each trained variable
  that is on another device than a tower, its value once and one gradient (with stages, the value
  once for each stage that takes it); of W bytes of replicas on N towers `2 (N - 1) W`; and beside
  these at most the batch, the outputs, statistics, rows of sparse gradients and scalars.

Each build is a line of `gpus/graphs-<version of TensorFlow>.jsonl`, so that the same command goes
on where it was; what broke a promise or failed is built again. It ends with a table, and with the
builds that towers refuses. ResNets and InceptionResNet have at most two of each block that they
repeat, unless `--blocks=0` asks for all. With two of each, a ResNet of 101, 152 or 200 layers is
the one of 50, and is left out.
"""

import argparse
import collections
import json
import os
import time
import typing

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import tensorflow.compat.v1 as tf  # noqa: E402

from benchmarks.recipe_models import RECIPES  # noqa: E402
from benchmarks.small_networks import fewer_blocks  # noqa: E402
from models import registry  # noqa: E402
from models.classifier import Classifier  # noqa: E402
import towers  # noqa: E402
from towers.errors import counted  # noqa: E402
from towers.graph.graph_walk import bytes_of, leaves_of, names_of, with_names  # noqa: E402
from towers.inspect.audit import operations_of_step, sent_tensors  # noqa: E402
from towers.inspect.findings import bytes_text  # noqa: E402
from towers.inspect.gpu_kernels import knows_gpu_kernels, moved_operations  # noqa: E402
from towers.model.objectives import all_pairs  # noqa: E402
from towers.placement.devices import is_gpu, short_name  # noqa: E402
from towers.placement.tower_device import operation_device, stages_of  # noqa: E402

_MORE_OF_THE_SAME_BLOCKS = frozenset(
    'resnet_v%d_%d' % (version, layers) for version in (1, 2) for layers in (101, 152, 200))
"""The networks that are another one with more of its blocks."""

COUNTS = (2, 8)
"""Numbers of towers."""

_EXAMPLES = 16  # of a batch
_CLASSES = 10
_SMALL = 32  # bytes at most, as of a scalar, or of a shape


class Mode(typing.NamedTuple):
    """A way to build towers.

    Attributes:
      options: arguments of `build_towers`.
      stages: the GPUs of each tower.
      cluster: the kind of a cluster of two workers; None: one machine.
    """
    options: dict
    stages: int = 1
    cluster: typing.Optional[str] = None

    @property
    def has_weights_on_gpus(self):
        """Whether the weights are on the GPUs, and not on a CPU."""
        return 'variables' in self.options


def _numerics(**fields):
    return Mode(dict(numerics=towers.Numerics(**fields)))


MODES = collections.OrderedDict([
    ('shared', Mode({})),
    ('sync', Mode(dict(batch_norm='sync'))),
    ('replicated', Mode(dict(variables=towers.VariablePlacement('replicated')))),
    ('balanced', Mode(dict(variables=towers.VariablePlacement('balanced')))),
    ('accumulate', Mode(dict(memory=towers.Memory(accumulate=2)))),
    ('recompute', Mode(dict(memory=towers.Memory(recompute='auto')))),
    ('fp16', _numerics(precision='fp16')),
    ('bf16', _numerics(precision='bf16')),
    ('stages', Mode(dict(pipeline=towers.Pipeline(2, stages='auto')), stages=2)),
    ('xla', _numerics(xla=True)),
    ('reuse', Mode(dict(copies='reuse'))),
    ('ring', Mode({}, cluster='ring')),
    ('ps', Mode({}, cluster='ps')),
])
"""The modes in which each network is built, by name."""

FURTHER_MODES = collections.OrderedDict([
    ('check', _numerics(check_numerics=True)),
    ('weight', Mode(dict(remainder='weight'))),
    ('sum', Mode(dict(reduction='sum'))),
    ('both', Mode(dict(variables=towers.VariablePlacement('replicated'),
                       memory=towers.Memory(accumulate=2)))),
])
"""Modes that do the same to each network: the digits alone are built in them. In `both` replicas
accumulate."""

ALL_MODES = collections.OrderedDict(list(MODES.items()) + list(FURTHER_MODES.items()))
"""The modes of both."""


# ---- networks ------------------------------------------------------------------------------------

class Subject(typing.NamedTuple):
    """A network to be built.

    Attributes:
      model_fn: the model function.
      inputs: nest of placeholders of static shapes.
      optimizer: what `build_towers` takes as `optimizer`.
      options: further arguments of `build_towers` that belong to the network.
      without_kernel: types of its operations that have no GPU kernel.
    """
    model_fn: typing.Callable
    inputs: typing.Any
    optimizer: typing.Any
    options: dict
    without_kernel: typing.Tuple[str, ...]


def subject_named(name):
    """The `Subject` of a recipe or of a network of models/, in the default graph."""
    if name in RECIPES:
        recipe = RECIPES[name]
        return Subject(recipe.model_fn, recipe.placeholders(_EXAMPLES), recipe.optimizer(), {},
                       recipe.without_kernel)
    network = registry.get_network(name)
    classifier = Classifier(network, _CLASSES, image_size=network.default_image_size)
    size = classifier.image_format['image_size']
    images = tf.placeholder(
        tf.float32, [_EXAMPLES, size, size, classifier.image_format['channels']])
    labels = tf.placeholder(tf.int64, [_EXAMPLES])
    return Subject(classifier.model_fn('train'), (images, labels),
                   tf.train.MomentumOptimizer(.01, .9),
                   {'regularization': classifier.regularization}, ())


def build(subject, mode, num_towers):
    """The towers of a `Subject` in a `Mode`, on the GPUs of another machine: `BuiltTowers`."""
    options = dict(subject.options)
    options.setdefault('reduction', 'mean')
    options.update(mode.options)
    if mode.cluster is not None:
        servers = ['c:3'] if mode.cluster == 'ps' else ()
        options['cluster'] = towers.Cluster(mode.cluster, ['a:1', 'b:2'], servers, rank=0)
    return towers.build_towers(subject.model_fn, subject.inputs, subject.optimizer,
                               gpus(num_towers, mode.stages), **options)


def gpus(num_towers, stages=1):
    """Names of the GPUs of so many towers, for another machine."""
    names = ['/gpu:%d' % number for number in range(num_towers * stages)]
    if stages > 1:
        names = [names[start:start + stages] for start in range(0, len(names), stages)]
    return towers.resolve_devices(names, check=False)


# ---- what is checked of a build ------------------------------------------------------------------

class Checked(typing.NamedTuple):
    """What the check of a build has found.

    Attributes:
      faults: list of lines: what is not as the plan and the formulas of this module say.
      weights: the bytes of the trained variables.
      crossing: the `Crossing` of a step.
    """
    faults: typing.List[str]
    weights: int
    crossing: 'Crossing'

    def __str__(self):
        """The faults in a line; the bytes if there is none."""
        return '; '.join(self.faults) or '%s of weights; %s with the CPU, %s between towers' % (
            bytes_text(self.weights), bytes_text(self.crossing.with_cpu),
            bytes_text(self.crossing.between_towers))


def check(built, mode=MODES['shared'], without_kernel=()):
    """Checks a build: `Checked`.

    Args:
      built: the result of `build`.
      mode: the `Mode` in which it was built.
      without_kernel: types of operations that may lack a GPU kernel.
    """
    step = operations_of_step(built)
    sent = sent_tensors(step)
    crossing = _crossing(built, sent)
    faults = (_faults_of_audit(built) + _missing_kernels(built, step, without_kernel)
              + _misplaced_sums(built) + _misfit_bytes(built, mode, step, sent, crossing))
    weights = sum(bytes_of(variable) for _, variable in all_pairs(built.gradients))
    return Checked(faults, weights, crossing)


def _faults_of_audit(built):
    """The broken promises of an audit, but for kernels, see `_missing_kernels`."""
    return [line for line in towers.audit(built).broken if 'GPU kernel' not in line]


def _missing_kernels(built, step, without_kernel):
    """A line for each tower and GPU with operations that would be on the CPU for want of a kernel,
    but for operations of the types `without_kernel`. [] where TensorFlow does not know kernels."""
    if not knows_gpu_kernels():
        return []
    found = []
    for moved in moved_operations(step, built.towers):
        operations = moved.on_floats + moved.on_others + moved.pulled
        unknown = [op for op in operations if op.type not in without_kernel]
        if unknown:
            found.append('%s of tower %s on %s without a GPU kernel: %s' % (
                counted(len(unknown), 'operation'), moved.owner, short_name(moved.device),
                ', '.join('%s (%s)' % (op.name, op.type) for op in unknown[:3])))
    return found


def _misplaced_sums(built):
    """Lists the sums of gradients that are not on the device of their variable."""
    if built.replicas is not None or built.machines is not None:
        return []  # each replica has a sum of its own; machines add up where their engine does
    found = []
    for gradient, variable in all_pairs(built.gradients):
        if gradient is None:
            continue
        tensor = getattr(gradient, 'values', gradient)
        device = operation_device(tensor.op)
        if device != operation_device(variable.op):
            found.append('the sum of the gradients of %s is on %s, and the variable on %s' % (
                variable.op.name, short_name(device), short_name(operation_device(variable.op))))
    return found


class Crossing(typing.NamedTuple):
    """The bytes that cross between devices in a step.

    Attributes:
      with_cpu: bytes between a CPU and a GPU.
      between_towers: bytes between GPUs of different towers.
      small: the part of both that is in tensors of at most `_SMALL` bytes.
    """
    with_cpu: int
    between_towers: int
    small: int


def _crossing(built, sent):
    """The `Crossing` of a build, from the tensors that are sent."""
    tower_of_gpu = {}
    for index, device in enumerate(built.devices):
        tower_of_gpu.update(dict.fromkeys(stages_of(device), index))
    with_cpu = between_towers = small = 0
    for (source, target), tensors in sent.items():
        sizes = list(map(_size, tensors.values()))
        if is_gpu(source) != is_gpu(target):
            with_cpu += sum(sizes)
        elif tower_of_gpu.get(source) != tower_of_gpu.get(target):
            between_towers += sum(sizes)
        else:
            continue  # between stages of one tower
        small += sum(size for size in sizes if size <= _SMALL)
    return Crossing(with_cpu, between_towers, small)


def _misfit_bytes(built, mode, step, sent, crossing):
    """Lists the bytes between devices that are not those of the formula."""
    weights = _bytes_of_weights(built, step)
    others = _bytes_of_others(built, mode, step) + crossing.small
    with_cpu = between_towers = 0
    if not mode.has_weights_on_gpus:
        with_cpu = weights
    else:
        between_towers = weights
    found = []
    for name, count, least in (('CPU and GPUs', crossing.with_cpu, with_cpu),
                               ('GPUs of different towers', crossing.between_towers,
                                between_towers)):
        if not least <= count <= least + others:
            found.append('%s cross between %s, and the formula gives %s, with at most %s beside; '
                         'the largest: %s' % (
                             bytes_text(count), name, bytes_text(least), bytes_text(others),
                             _largest(sent)))
    return found


def _largest(sent):
    """The names of the largest tensors that are sent, with their sizes."""
    tensors = {}
    for tensors_of_pair in sent.values():
        tensors.update(tensors_of_pair)
    largest = sorted(tensors.values(), key=_size, reverse=True)
    return ', '.join('%s %s' % (tensor.name, bytes_text(_size(tensor))) for tensor in largest[:4])


class _Trained(typing.NamedTuple):
    """A trained variable.

    Attributes:
      variable: the variable.
      has_dense_gradient: whether a tower's gradient of it is a tensor, and not rows.
    """
    variable: tf.Variable
    has_dense_gradient: bool


def _trained_variables(built):
    """List of the `_Trained` variables, one for each loss that trains them."""
    found = []
    pairs_of_towers = [tower.pairs for tower in built.towers]
    for pairs in zip(*pairs_of_towers):  # the towers' gradients of one variable
        gradients = [gradient for gradient, _ in pairs]
        found.append(_Trained(variable=pairs[0][1], has_dense_gradient=any(
            isinstance(gradient, tf.Tensor) for gradient in gradients)))
    return found


def _bytes_of_weights(built, step):
    """The bytes of reads of the trained variables and of their gradients that cross in a step.

    A tower on another device than the variable's gets the value once, each of its stages for
    itself, and gives one gradient.
    """
    trained = _trained_variables(built)
    if built.replicas is not None:
        sizes = [bytes_of(each.variable) for each in trained if each.has_dense_gradient]
        return 2 * (len(built.devices) - 1) * sum(sizes)
    total = 0
    seen = set()
    names = names_of(step)
    for variable, has_dense_gradient in trained:
        device = operation_device(variable.op)
        for tower_device in built.devices:
            stages = stages_of(tower_device)
            times = 0
            if variable.op.name not in seen:
                times = len(_taking_devices(variable, names).intersection(stages) - {device})
            if has_dense_gradient and device not in stages:
                times += 1
            total += times * bytes_of(variable)
        seen.add(variable.op.name)  # a variable that two losses train is read once
    return total


def _taking_devices(variable, names):
    """The devices on which operations of these names take the whole value of a variable."""
    devices = set()
    for read in variable.op.outputs[0].consumers():
        if read.type == 'ReadVariableOp' and read.name in names:
            takers = with_names(read.outputs[0].consumers(), names)
            devices.update(map(operation_device, takers))
    return devices


def _bytes_of_others(built, mode, step):
    """What may cross beside the weights and gradients, in bytes.

    That are

    - the batch, to each stage of its tower once, and the outputs;
    - the rows that are looked up, with their numbers, and those of sparse gradients, with replicas
      for each tower;
    - of the variables that are not trained, what each operation of the step reads or writes;
    - with `batch_norm='sync'` the statistics of each norm, which have the size of its moving
      averages, to the sum and back, forward and backward.
    """
    stages = len(stages_of(built.devices[0]))
    total = stages * sum(map(_size, leaves_of([tower.inputs for tower in built.towers])))
    total += sum(map(_size, leaves_of([built.predictions, built.metrics, built.loss])))
    names_of_trained = set()
    for variable, _ in _trained_variables(built):
        names_of_trained.add(variable.op.name)
        for op in variable.op.outputs[0].consumers():
            if op.type == 'ResourceGather':
                total += stages * (_size(op.inputs[1]) + _size(op.outputs[0]))
    copies_of_rows = 1 if built.replicas is None else 2 * len(built.devices)
    for tower in built.towers:
        for gradient, _ in tower.pairs:
            if isinstance(gradient, tf.IndexedSlices):
                total += copies_of_rows * (_size(gradient.values) + _size(gradient.indices))
    names = names_of(step)
    state = 0
    for variable in built.variables:
        if variable.op.name not in names_of_trained:
            state += bytes_of(variable)
            takers = with_names(variable.op.outputs[0].consumers(), names)
            total += stages * len(takers) * bytes_of(variable)
    if mode.options.get('batch_norm') == 'sync':
        total += 4 * len(built.towers) * state
    return total


def _size(tensor):
    """The bytes of a tensor; 0 where its shape is not static."""
    elements = tensor.shape.num_elements() if isinstance(tensor, tf.Tensor) else None
    return 0 if elements is None else elements * tensor.dtype.size


# ---- all builds, one after the other -------------------------------------------------------------

class Outcome(typing.NamedTuple):
    """What came of a build.

    Attributes:
      network, mode, num_towers: what was built.
      result: 'kept', 'refused' by towers, or 'fault'.
      text: the bytes that cross; the words of the refusal; or the faults.
      seconds: how long build and check took.
    """
    network: str
    mode: str
    num_towers: int
    result: str
    text: str
    seconds: float

    @property
    def key(self):
        """What was built."""
        return self.network, self.mode, self.num_towers


def main(arguments=None):
    """Builds what is left, as a program of its own; returns 1 if anything is at fault."""
    options = parse(arguments)
    if not knows_gpu_kernels():
        raise SystemExit('This TensorFlow was built without GPUs, and does not know their kernels: '
                         'take TensorFlow 2.')
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    return run(options)


def run(options):
    """Builds what is left, and prints a line for each build, the table, and what was refused.

    Returns:
      1 if anything is not as it should be; else 0.
    """
    towers.mend_slim()
    os.makedirs(options.directory, exist_ok=True)
    path = os.path.join(options.directory, 'graphs-%s.jsonl' % tf.version.VERSION)
    done = read(path)
    wanted = all_builds(options)
    left = [key for key in wanted if key not in done or done[key].result == 'fault']
    end = time.time() + options.seconds
    with open(path, 'a') as log:
        for number, key in enumerate(left, len(wanted) - len(left) + 1):
            if time.time() > end:
                break
            outcome = outcome_of(*key, blocks=options.blocks)
            done[key] = outcome
            log.write(json.dumps(outcome) + '\n')
            log.flush()
            print('%5d of %d  %-20s %-11s %d GPUs  %-8s %5.1f s  %s' % (
                number, len(wanted), outcome.network, outcome.mode, outcome.num_towers,
                outcome.result, outcome.seconds, outcome.text), flush=True)
    outcomes = [done[key] for key in wanted if key in done]
    print('\n' + table(outcomes))
    print('\n' + summary(wanted, outcomes))
    return int(any(outcome.result == 'fault' for outcome in outcomes))


def parse(arguments=None):
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--networks', default='', help='names with commas; all if empty')
    parser.add_argument('--modes', default='', help='names with commas; all if empty')
    parser.add_argument('--towers', default='2,8', help='numbers of towers with commas')
    parser.add_argument('--blocks', type=int, default=2,
                        help='the most of each repeated block of a network; 0: all')
    parser.add_argument('--seconds', type=float, default=float('inf'),
                        help='begin no build after so many seconds')
    parser.add_argument('--directory', default='gpus', help='where the outcomes are kept')
    return parser.parse_args(arguments)


def all_builds(options):
    """The (network, mode, number of towers) that the options ask for, the cheap ones first."""
    networks = tuple(RECIPES) + registry.NAMES
    if options.blocks:
        networks = tuple(name for name in networks if name not in _MORE_OF_THE_SAME_BLOCKS)
    wanted_networks = _chosen(options.networks, networks, 'network')
    wanted_modes = _chosen(options.modes, ALL_MODES, 'mode')
    found = []
    for count in map(int, options.towers.split(',')):
        for mode in wanted_modes:
            for network in wanted_networks:
                if mode in MODES or network == 'digits':
                    found.append((network, mode, count))
    return sorted(found, key=_is_large)


def _chosen(text, names, noun):
    """The names in a text with commas, or all; exits where there is no such name."""
    chosen = text.split(',') if text else list(names)
    for name in chosen:
        if name not in names:
            raise SystemExit('There is no %s %r. Those there are: %s.' % (
                noun, name, ', '.join(names)))
    return chosen


def _is_large(key):
    """A key to sort builds by: whether the network is large, and then the number of towers."""
    network, _, count = key
    is_large = network in registry.NAMES and network != 'digits'
    return is_large, count


def read(path):
    """{(network, mode, number of towers): the last `Outcome` of it} of a file, which may be new."""
    outcomes = {}
    if os.path.exists(path):
        with open(path) as log:
            for line in log:
                outcome = Outcome(*json.loads(line))
                outcomes[outcome.key] = outcome
    return outcomes


def outcome_of(network, mode, num_towers, blocks=2):
    """Builds a network in a mode, and checks it: an `Outcome`."""
    begin = time.time()
    try:
        result, text = _built_and_checked(network, ALL_MODES[mode], num_towers,
                                          blocks)
    except towers.TowersError as error:
        result, text = 'refused', '%s: %s' % (type(error).__name__, error)
    except Exception as error:  # whatever it is, the other builds go on
        result, text = 'fault', '%s: %.500s' % (type(error).__name__, error)
    return Outcome(network, mode, num_towers, result, text.replace('\n', ' '),
                   round(time.time() - begin, 1))


def _built_and_checked(network, mode, num_towers, blocks):
    """(result, text) of an `Outcome`."""
    with tf.Graph().as_default(), fewer_blocks(blocks):
        subject = subject_named(network)
        built = build(subject, mode, num_towers)
        checked = check(built, mode, subject.without_kernel)
    return 'fault' if checked.faults else 'kept', str(checked)


# ---- what is printed -----------------------------------------------------------------------------

_SIGNS = {'kept': '+', 'refused': 'r', 'fault': 'X', None: '.'}


def table(outcomes):
    """A Markdown table: a row a network, a column a mode, a sign for each number of towers."""
    results = {outcome.key: outcome.result for outcome in outcomes}
    networks = list(dict.fromkeys(outcome.network for outcome in outcomes))
    modes = list(dict.fromkeys(outcome.mode for outcome in outcomes))
    counts = sorted({outcome.num_towers for outcome in outcomes})
    lines = ['| | %s |' % ' | '.join(modes), '|---|' + '---|' * len(modes)]
    for network in networks:
        cells = []
        for mode in modes:
            cells.append(''.join(_SIGNS[results.get((network, mode, count))] for count in counts))
        lines.append('| %s | %s |' % (network, ' | '.join(cells)))
    lines.append('')
    lines.append('A sign for %s GPUs each: + all is as it should be, r refused, X not as it should '
                 'be, . not built.' % ' and '.join(map(str, counts)))
    return '\n'.join(lines)


def summary(wanted, outcomes):
    """How many builds had which result, and the words of the refusals and faults."""
    counts = collections.Counter(outcome.result for outcome in outcomes)
    lines = ['%s of %d: %d kept, %d refused, %d at fault; %d not built' % (
        counted(len(outcomes), 'build'), len(wanted), counts['kept'], counts['refused'],
        counts['fault'], len(wanted) - len(outcomes))]
    for result in ('refused', 'fault'):
        by_text = collections.OrderedDict()
        for outcome in outcomes:
            if outcome.result == result:
                by_text.setdefault(outcome.text, []).append('%s %s %d' % outcome.key)
        for text, keys in by_text.items():
            lines.append('%s: %s\n    %s' % (result, text, '; '.join(keys)))
    return '\n'.join(lines)


if __name__ == '__main__':
    raise SystemExit(main())
