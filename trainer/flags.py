"""The settings of train.py: flags, and options of --config, in one table.

Flags are the settings that most runs give, at most 50, in groups as --help shows them. Options are
settings that few runs need; --config gives them, from a JSON file or as JSON. The values of both
are attributes of `FLAGS`. To add a setting, write a row of `GROUPS` or `OPTIONS`, with the kind of
change that another value means for a run that goes on; refuse it in `contradictions` where it has
no effect.

The choices of a setting are written here, also where a module of `towers` or `datasets` has them:
flags are checked before these modules, and TensorFlow, are imported. The test,
tests/trainer/test_trainer_flags.py, compares both.
"""

import collections
import os
import re
import typing

from absl import flags

FLAGS = flags.FLAGS

CLUSTERS = ['ring', 'ps', 'horovod']
OPTIMIZERS = ['sgd', 'momentum', 'adam', 'adamw', 'rmsprop', 'lars', 'lamb']
DECAYS_OF_WEIGHTS = ['adamw', 'lars', 'lamb']  # optimizers that decay weights without an L2 loss
DECAYS_BY_RATE = ['exponential', 'step']
DECAYS_TO_0 = ['polynomial', 'cosine']  # without --decay_epochs, at the end of the run
DECAYS_OVER_EPOCHS = DECAYS_BY_RATE + DECAYS_TO_0 + ['cosine_restarts']

# Upper bounds of numbers. A larger number is a typing error, which TensorFlow would answer with a
# traceback of its own, or with endless work. Steps times examples a step fit into an int64, and a
# float into a float32.
MOST_PIXELS = 4096
MOST_TOWERS = 10000
MOST_EPOCHS = 10 ** 6
MOST_CHECKPOINTS = 10 ** 6
MOST_EXAMPLES = 10 ** 6
MOST_STEPS = 10 ** 12
MOST_FLOAT = 3e38

# What another value of a setting means for a run that goes on.
ONCE = 'of one start'  # nothing: the setting is for one start, and is not recorded
HARMLESS = 'harmless'  # the numbers stay the same
CHANGES = 'changes the run'  # other numbers from there on
STATE = 'state'  # other variables in the checkpoints


class Setting(typing.NamedTuple):
    """A flag, or an option of --config.

    Attributes:
      name: the name of the setting.
      default: the default; values have its type.
      limits: for a number `(least, most)`; for a choice the list of words; else None.
      kind: what another value means for a run that goes on: `ONCE`, `HARMLESS`, `CHANGES` or
        `STATE`.
      text: a sentence for the help, without the default.
    """
    name: str
    default: typing.Any
    limits: typing.Any
    kind: str
    text: str


def _group(*rows: tuple) -> typing.List[Setting]:
    """The settings of a group; a row has the fields of a `Setting`."""
    return [Setting(*row) for row in rows]


GROUPS = collections.OrderedDict([
    ('What is trained', _group(
        ('mode', 'train', ['train', 'eval', 'predict', 'check_data', 'diagnose', 'memory',
                           'find_rate'], ONCE,
         'train; eval or predict with the newest checkpoint; check_data lists bad examples; '
         'diagnose measures whether input or towers are slower; memory shows where memory goes; '
         'find_rate tries learning rates'),
        ('model', 'digits', None, STATE, 'Name of a network (a wrong name lists all); or '
         'module:function, a model function (features, labels, mode)'),
        ('dataset', 'digits', None, STATE, 'Name of a data set (a wrong name lists all); '
         'or module:function, a function that returns tf.data pipelines'),
        ('data_dir', '', None, ONCE, 'Folder of the data set, if it is read from files'),
        ('image_size', 0, (0, MOST_PIXELS), STATE, "Height and width in pixels; 0: the network's "
         "or the data set's"),
        ('weight_decay', 4e-5, (0, MOST_FLOAT), CHANGES, 'Factor of the L2 loss of the weights; '
         'adamw, lars and lamb decay the weights by it, without an L2 loss'),
        ('init_from', '', None, ONCE, 'Checkpoint to take initial weights from, where names '
         'and shapes fit'))),
    ('Towers', _group(
        ('num_towers', 2, (1, MOST_TOWERS), CHANGES, 'Number of towers (copies of the model), each '
         'on its own device: on GPUs if there are any, else on virtual CPUs'),
        ('devices', '', None, CHANGES, "The towers' devices by name, '/gpu:0,/gpu:2', instead of "
         "--num_towers"),
        ('batch_size', 100, (1, MOST_EXAMPLES), CHANGES, "Examples a step, all towers together; "
         "'auto': the most that memory holds"),
        ('accumulate', 1, (1, MOST_TOWERS), CHANGES, 'Each tower computes its part of the batch in '
         'so many pieces, one after the other, before the update'),
        ('recompute', '', None, HARMLESS, "'auto': the backward pass computes the forward pass "
         'again, which saves memory; or the names of the tensors to keep, with commas between'),
        ('reduction', 'sum', ['sum', 'mean'], CHANGES, "mean: the update takes the gradient of the "
         "whole batch's mean loss; sum: that gradient times the number of towers"),
        ('variable_device', '', None, CHANGES, "Device of the variables, or 'balanced' over all, "
         "or 'replicated' on each tower's; if empty, the CPU, or the GPU if there is one"),
        ('batch_norm', 'shard', ['shard', 'sync'], CHANGES, "Statistics of batch norm: shard, of a "
         "tower's part of the batch; sync, of the whole batch"),
        ('precision', 'float32', ['float32', 'bf16', 'fp16'], STATE, 'Number format of products '
         'and convolutions: bf16 for CPUs, fp16 for GPUs'))),
    ('Optimizer', _group(
        ('optimizer', 'adam', OPTIMIZERS, STATE, 'Update rule'),
        ('momentum', 0.9, (0, 1), CHANGES, 'Momentum of the optimizers momentum, rmsprop, lars'),
        ('clip_norm', 0., (0, MOST_FLOAT), CHANGES, 'Gradients whose global norm is larger are '
         'scaled down to this norm; 0: never'),
        ('base_learning_rate', 0.001, (0, MOST_FLOAT), CHANGES, 'Learning rate for the batch of '
         'one tower'),
        ('lr_scaling', 'none', ['none', 'sqrt', 'linear'], CHANGES, 'Factor of the learning rate '
         'on N towers: none, 1; sqrt, the square root of N; linear, N'),
        ('warmup_epochs', 0., (0, MOST_EPOCHS), CHANGES, 'Epochs in which the learning rate rises '
         'to its full value'),
        ('decay', 'none', ['none'] + DECAYS_OVER_EPOCHS, CHANGES, 'Schedule by which the learning '
         'rate falls'),
        ('decay_epochs', 0., (0, MOST_EPOCHS), CHANGES, 'exponential, step: epochs in which the '
         'rate falls by --decay_rate; polynomial, cosine: until it is 0 (0: the whole run); '
         'cosine_restarts: until the first restart'),
        ('decay_rate', 0.94, (0, 1), CHANGES, 'exponential, step: what the rate is multiplied by '
         'in --decay_epochs'),
        ('average_decay', 0., (0, 1), STATE, 'Decay of moving averages of the weights; '
         'evaluation and export then take these averages; 0: no averages'))),
    ('The run', _group(
        ('train_dir', '', None, ONCE, 'Folder of the run; a run that is there already goes on; '
         'if empty, runs/<model>'),
        ('train_steps', 0, (0, MOST_STEPS), HARMLESS, 'Steps of the whole run; 0: --train_epochs'),
        ('train_epochs', 30., (0, MOST_EPOCHS), HARMLESS, 'Passes over the training set'),
        ('max_minutes', 0., (0, MOST_FLOAT), ONCE, 'Minutes after which the program saves and '
         'ends; the same command goes on later; 0: no limit'),
        ('sweep', [], None, ONCE, "Trains once for each value, 'seed=1,2,3'; given again for "
         'another flag, once for each combination; a folder each below --train_dir'),
        ('eval_steps', 0, (0, MOST_STEPS), HARMLESS, 'Steps between evaluations of the test set; '
         '0: one at the end'),
        ('save_steps', 500, (1, MOST_STEPS), HARMLESS, 'Steps between checkpoints'),
        ('keep_best', '', None, HARMLESS, "Metric whose best checkpoint is kept in the folder "
         "best: that with the largest value; for loss and '-perplexity' with the smallest"),
        ('stop_after', 0, (0, MOST_STEPS), HARMLESS, 'The run ends after so many evaluations '
         'without a better value of --keep_best; 0: never'),
        ('seed', 1, (0, 2 ** 31 - 1), CHANGES, 'Seed of initial weights, order of the data, '
         'augmentation and dropout'),
        ('deterministic', False, None, CHANGES, 'Gives the same bits in each run on GPUs, too, '
         'with slower kernels; an operation without such a kernel fails'))),
    ('What is shown and written', _group(
        ('plan', False, None, ONCE, 'Shows the whole plan and audit of the graph, not the '
         'short form'),
        ('plan_only', False, None, ONCE, 'Shows the whole plan and audit, and trains nothing'),
        ('log_every', 100, (1, MOST_STEPS), HARMLESS, 'Steps between lines of metrics.jsonl, and '
         'of the screen if it is no terminal'),
        ('summary_steps', 100, (0, MOST_STEPS), HARMLESS, 'Steps between summaries for '
         'TensorBoard; 0: no summaries'),
        ('profile_steps', '', None, ONCE, "Two steps, '100,105': writes a Chrome trace of step 100 "
         "and TensorBoard's profile of steps 101 to 105"),
        ('report', 0, (0, MOST_STEPS), ONCE, 'Step of which a page is written into the folder of '
         'the run that says where its time and its memory go; 0: none'),
        ('hooks', '', None, ONCE, 'module:function, a function (run) that returns '
         'SessionRunHooks'),
        ('predictions', 'predictions.csv', None, ONCE, 'File that --mode=predict writes, a row '
         'an example'),
        ('export_dir', '', None, ONCE, 'Folder for a SavedModel of the final weights, in a '
         'subfolder named by the step'),
        ('config', [], None, ONCE, 'JSON file of options, or the JSON itself, '
         '\'{"label_smoothing": 0.1}\'; given again, later values count'))),
    ('Several machines', _group(
        ('cluster', '', ['', *CLUSTERS], CHANGES, 'Trains on the machines of '
         'TF_CONFIG, each with --num_towers and --batch_size: by ring all-reduce, by ps (parameter '
         'servers), or by horovod'),
        ('job_name', '', ['', 'evaluator'], ONCE, 'evaluator: evaluates each new checkpoint of the '
         'run in --train_dir, until that run ends')))])

OPTIONS = _group(
    ('num_classes', 0, (0, MOST_EXAMPLES), STATE, 'Classes of tfrecords, 0 for as many as '
     'labels.txt lists; of synthetic images, 0 for 1000'),
    ('background_class', False, None, STATE, 'Labels of tfrecords begin at 1, and 0 is a class '
     'more'),
    ('augment', 'inception', ['inception', 'crop', 'none'], CHANGES, 'Images in files: cut out at '
     'random, mirrored, colours distorted; without the colours; or the centre of each'),
    ('augment_shift', 0, (0, MOST_PIXELS), CHANGES, 'Pixels by which images of other data sets '
     'are shifted at random, at most'),
    ('remainder', 'carry', ['carry', 'drop'], CHANGES, 'Last batch of an epoch: filled with '
     'the next epoch, or dropped'),
    ('bad_examples', '', None, CHANGES, 'File that lists the examples to leave out, which '
     '--mode=check_data writes'),
    ('aux_loss_weight', 0.4, (0, MOST_FLOAT), STATE, 'Factor of the loss of auxiliary logits, of '
     'networks that have them; 0 builds none'),
    ('batch_norm_decay', -1., (-1, 1), CHANGES, "Decay of batch norm's moving averages; -1 for "
     "what the network asks for"),
    ('decay_power', 1., (0.01, 100), CHANGES, 'Power of --decay=polynomial'),
    ('restart_growth', 2., (1, 100), CHANGES, '--decay=cosine_restarts: length of each period over '
     'that of the one before'),
    ('label_smoothing', 0., (0, 1), CHANGES, 'Part of each training label that is spread evenly '
     'over all classes'),
    ('base_batch_size', 0, (0, MOST_EXAMPLES), CHANGES, 'Batch that --base_learning_rate is meant '
     'for, 0 for that of one tower'),
    ('micro_batches', 1, (1, MOST_TOWERS), CHANGES, 'Micro-batches that go through the stages of a '
     "tower of several devices, '/gpu:0+/gpu:1'"),
    ('shares', '', None, CHANGES, "Proportions of the towers' shards, such as '3,1'; equal if "
     'empty'),
    ('copies', 'clone', ['clone', 'reuse'], HARMLESS, 'Towers after the first: copies of its '
     'graph, or a call of the model each'),
    ('loss_scale', 0., (0, MOST_FLOAT), STATE, 'First factor of the loss, halved when a gradient '
     'overflows; 0 for 32768 with fp16, else none'),
    ('xla', False, None, CHANGES, "Compile each tower's passes; takes long to start"),
    ('stop_at_accuracy', 0., (0, 1), HARMLESS, 'Test accuracy at which the run ends, by '
     '--eval_steps'),
    ('keep', 5, (1, MOST_CHECKPOINTS), HARMLESS, 'Newest checkpoints to keep'),
    ('recover', False, None, ONCE, 'Go on from the checkpoint before, if the newest is damaged'),
    ('check_numerics', True, None, HARMLESS, 'Stop at the first NaN or infinity in a loss or '
     'gradient'),
    ('probabilities', False, None, ONCE, 'Predictions have the probabilities of all classes'),
    ('confusion', '', None, ONCE, 'Picture (.png, by matplotlib) or table (.csv) of the confusion '
     'matrix that --mode=eval writes; it then shows accuracies by class, too'),
    ('unlabelled', '', None, ONCE, 'Folder of images that --mode=predict predicts, in place of the '
     'test set; with a data set of image files'),
    ('validation', 0., (0, 0.5), CHANGES, 'Part of the training examples that a run holds out, and '
     'evaluates in place of the test set'),
    ('summary_images', 3, (0, MOST_EXAMPLES), HARMLESS, 'Images of the input in a TensorBoard '
     'summary'),
    ('histograms', False, None, HARMLESS, 'Histograms of weights and gradients in TensorBoard'),
    ('memory_limit', 0., (0, MOST_FLOAT), ONCE, 'MB of a GPU, or of all CPUs together, for '
     '--batch_size=auto and --mode=memory; 0 for what there are'),
    ('memory_plot', '', None, ONCE, 'Picture that --mode=memory writes, a PNG, by matplotlib'),
    ('rate_plot', '', None, ONCE, 'Picture (.png, by matplotlib) or table (.csv) of the losses of '
     '--mode=find_rate'),
    ('rate_steps', 100, (10, MOST_EXAMPLES), ONCE, 'Steps of --mode=find_rate'),
    ('memory_fraction', 0., (0, 1), ONCE, "Most of each GPU's memory that is taken, 0 for all"),
    ('allow_growth', True, None, ONCE, 'Take memory of a GPU as it is needed, not all at once'),
    ('intra_op_threads', -1, (-1, MOST_TOWERS), ONCE, 'Threads of one operation; 0 as TensorFlow '
     'chooses; -1 for OMP_NUM_THREADS, or 1 for as many CPU towers as cores'),
    ('inter_op_threads', 0, (0, MOST_TOWERS), ONCE, 'Operations that run at once on CPUs, 0 as '
     'TensorFlow chooses'),
    ('diagnose_seconds', 5., (0.1, 3600), ONCE, 'Seconds of each measurement of '
     '--mode=diagnose'),
    ('synchronous', True, None, CHANGES, 'Whether a step of --cluster=ps waits for all workers'),
    ('start_timeout', 120., (0.1, MOST_FLOAT), ONCE, 'Seconds to wait for the other machines at '
     'the start'),
    ('dead_after', 30., (0.5, MOST_FLOAT), ONCE, 'Seconds without a sign of life after which a '
     'worker or a server is gone'))

FLAGS_BY_NAME = collections.OrderedDict(
    (setting.name, setting) for settings in GROUPS.values() for setting in settings)
OPTIONS_BY_NAME = collections.OrderedDict((setting.name, setting) for setting in OPTIONS)
SETTINGS = collections.OrderedDict(list(FLAGS_BY_NAME.items()) + list(OPTIONS_BY_NAME.items()))

# Settings that are paths.
PATHS = ('train_dir', 'data_dir', 'init_from', 'export_dir', 'predictions', 'memory_plot',
         'rate_plot', 'confusion', 'unlabelled', 'bad_examples')


class _BatchSizeParser(flags.IntegerParser):
    """Parses the value of --batch_size: a whole number, or 'auto'."""

    def parse(self, argument: typing.Any) -> typing.Any:
        """The value, an int or 'auto'; raises `ValueError` for something else."""
        if argument == 'auto':
            return argument
        try:
            return super(_BatchSizeParser, self).parse(argument)
        except ValueError as error:
            if re.match(r'[+-]?\d+$', str(argument)):  # the error says that it is out of range
                raise
            raise ValueError("expected a whole number, or 'auto'") from error


def _define(setting: Setting) -> None:
    """Defines a setting as a flag of absl, which checks its values.

    The type of the default says which kind of flag it is; a choice has a list of words as `limits`.
    """
    name = setting.name
    default = setting.default
    limits = setting.limits
    text = setting.text
    if name == 'batch_size':  # the only setting whose values have two types
        # The serializer turns a value back into the text of the flag.
        flags.DEFINE(_BatchSizeParser(*limits), name, default, text,
                     serializer=flags.ArgumentSerializer())
    elif isinstance(default, bool):  # before int, of which bool is a subclass
        flags.DEFINE_boolean(name, default, text)
    elif isinstance(limits, list):
        flags.DEFINE_enum(name, default, limits, text)
    elif isinstance(default, list):
        flags.DEFINE_multi_string(name, default, text)
    elif isinstance(default, str):
        flags.DEFINE_string(name, default, text)
    elif isinstance(default, int):
        flags.DEFINE_integer(name, default, text, lower_bound=limits[0], upper_bound=limits[1])
    else:
        flags.DEFINE_float(name, default, text, lower_bound=limits[0], upper_bound=limits[1])


for _setting in SETTINGS.values():
    _define(_setting)


class ProfiledSteps(typing.NamedTuple):
    """The steps of --profile_steps; 1 < first < last."""
    first: int
    last: int


def train_dir() -> str:
    """The folder of the run: --train_dir, or one that is named after the model."""
    # The ':' of `module:function` is no character for a folder's name.
    return FLAGS.train_dir or os.path.join('runs', FLAGS.model.replace(':', '.'))


def decays_until_the_end() -> bool:
    """Whether the learning rate falls until the last step of the run, for want of --decay_epochs.

    If so, a longer run has other rates from its first step on.
    """
    return FLAGS.decay in DECAYS_TO_0 and not FLAGS.decay_epochs


def profiled_steps(text: str) -> typing.Optional[ProfiledSteps]:
    """The steps of --profile_steps; None where the text is no two steps, 1 < first < last.

    Args:
      text: the value of the flag, such as `'100,105'`.
    """
    # At most 12 digits, since Python refuses to read a number of thousands of digits.
    found = re.fullmatch(r'(\d{1,12}),(\d{1,12})', text)
    if found is None:
        return None
    steps = ProfiledSteps(int(found.group(1)), int(found.group(2)))
    return steps if 1 < steps.first < steps.last else None
