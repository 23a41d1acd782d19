"""Graphs for GPUs, checked on a machine that has none: every network in every mode.

    python -m benchmarks.gpu_graphs                    all of them, for 2 and for 8 GPUs: hours
    python -m benchmarks.gpu_graphs --seconds=400      begins no further build after 400 seconds
    python -m benchmarks.gpu_graphs --networks=digits,bert --modes=sync,stages --towers=2

No step is run. Of each build it is checked, by `towers.audit` and what the build returns, that

- no operation lacks a GPU kernel, but for those that the network is known to have;
- variables, slots and the operations of each tower are on the devices of the plan, and the sum of a
  variable's gradients is where the variable is;
- the bytes that cross between devices in a step are those of the formula: of each trained variable
  that is on another device than a tower, each whole read by the tower, in each of its micro-batches,
  and one gradient; of W bytes of replicas on N towers `2 (N - 1) W`; and beside these at most the
  batch, the outputs, statistics, rows of sparse gradients and scalars.

Each build is a line of `gpus/graphs-<version of TensorFlow>.jsonl`, so that the same command goes
on where it was; what broke a promise or failed is built again. It ends with a table, and with the
builds that towers refuses. ResNets and InceptionResNet have at most two of each block that they
repeat, unless `--blocks=0` asks for all.
"""

import argparse
import collections
import json
import os
import re
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
from towers.graph.graph_walk import bytes_of, leaves_of  # noqa: E402
from towers.inspect.findings import bytes_text  # noqa: E402
from towers.inspect.gpu_kernels import knows_gpu_kernels  # noqa: E402
from towers.model.objectives import all_pairs  # noqa: E402
from towers.placement.devices import is_gpu, short_name  # noqa: E402
from towers.placement.tower_device import operation_device, stages_of  # noqa: E402

COUNTS = (2, 8)
"""Numbers of towers."""

_EXAMPLES = 16  # of a batch
_CLASSES = 10
_SCALAR = 16  # bytes at most


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
    audited = towers.audit(built)
    crossing = _crossing(built, audited)
    faults = (_faults_of_audit(audited, without_kernel) + _misplaced_sums(built)
              + _misfit_bytes(built, mode, crossing))
    weights = sum(bytes_of(variable) for _, variable in all_pairs(built.gradients))
    return Checked(faults, weights, crossing)


def _faults_of_audit(audited, without_kernel):
    """The broken promises of an audit, and the operations without a kernel that are not known."""
    lines = audited.broken + [line for line in audited.notes if 'GPU kernel' in line]
    return [line for line in lines if not _is_known(line, without_kernel)]


def _is_known(line, without_kernel):
    """Whether a line of the audit names only operations that may lack a kernel."""
    types = re.findall(r'\((\w+) of ', line)
    return 'GPU kernel' in line and 'more)' not in line and set(types) <= set(without_kernel)


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
      tensors: the number of all tensors that cross.
    """
    with_cpu: int
    between_towers: int
    tensors: int


def _crossing(built, audited):
    """The `Crossing` of a build, from its audit."""
    tower_of_gpu = {}
    for index, device in enumerate(built.devices):
        tower_of_gpu.update(dict.fromkeys(stages_of(device), index))
    with_cpu = between_towers = tensors = 0
    for pair in audited.transfers:
        tensors += pair.tensors
        if is_gpu(pair.source) != is_gpu(pair.target):
            with_cpu += pair.bytes
        elif tower_of_gpu.get(pair.source) != tower_of_gpu.get(pair.target):
            between_towers += pair.bytes
    return Crossing(with_cpu, between_towers, tensors)


def _misfit_bytes(built, mode, crossing):
    """Lists the bytes between devices that are not those of the formula."""
    weights = _bytes_of_weights(built)
    others = _bytes_of_others(built, mode) + _SCALAR * crossing.tensors
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
            found.append('%s cross between %s, and the formula gives %s, with at most %s beside' % (
                bytes_text(count), name, bytes_text(least), bytes_text(others)))
    return found


def _bytes_of_weights(built):
    """The bytes of reads of the trained variables and of their gradients that cross in a step."""
    if built.replicas is not None:
        sizes = [bytes_of(variable) for gradient, variable in all_pairs(built.gradients)
                 if isinstance(gradient, tf.Tensor)]
        return 2 * (len(built.devices) - 1) * sum(sizes)
    total = 0
    for gradient, variable in all_pairs(built.gradients):
        device = operation_device(variable.op)
        elsewhere = [tower for tower in built.towers if device not in stages_of(tower.device)]
        # Tower 0's number is that of each tower; with copies='reuse' the others share its L2 losses.
        times = len(elsewhere) * _num_reads(variable, built.towers[0])
        if isinstance(gradient, tf.Tensor):
            times += len({tower.index for tower in elsewhere})
        total += times * bytes_of(variable)
    return total


def _num_reads(variable, tower):
    """How often the forward pass of a tower reads a whole variable."""
    takers = variable.op.outputs[0].consumers()
    return sum(op.type == 'ReadVariableOp' and op.name in tower.forward for op in takers)


def _bytes_of_others(built, mode):
    """What may cross beside the weights and gradients, in bytes.

    That are the batch and the outputs; for each tower the variables that are not trained; with
    `batch_norm='sync'` the statistics of each norm, which have the size of its moving averages, to
    the sum and back, forward and backward; the rows that are looked up, with their
    numbers, and those of sparse gradients, with replicas for each tower.
    """
    copies_of_rows = 1 if built.replicas is None else 2 * len(built.devices)
    total = sum(map(_size, leaves_of([tower.inputs for tower in built.towers])))
    total += sum(map(_size, leaves_of([built.predictions, built.metrics, built.loss])))
    trained = set()
    for gradient, variable in all_pairs(built.gradients):
        trained.add(variable.op.name)
        for op in variable.op.outputs[0].consumers():
            if op.type == 'ResourceGather':
                total += _size(op.inputs[1]) + _size(op.outputs[0])
        if isinstance(gradient, tf.IndexedSlices):
            total += copies_of_rows * (_size(gradient.values) + _size(gradient.indices))
    state = sum(bytes_of(each) for each in built.variables if each.op.name not in trained)
    exchanges = 4 if mode.options.get('batch_norm') == 'sync' else 0
    return total + (1 + exchanges) * len(built.devices) * state


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
