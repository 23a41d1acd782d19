"""What train.py finds out by running steps that train nothing: placement, memory, diagnosis."""

import tensorflow.compat.v1 as tf

from datasets.epochs import Epochs
import towers
from towers.memory.report import count_on_cpus
from towers.run.choose_placement import Trial
from trainer import diagnosis
from trainer.data import naming_failures
from trainer.flags import FLAGS, MOST_EXAMPLES, train_dir
from trainer.job import build_job, parts_of_batch
from trainer.records import recorded_choice
from trainer.resources import memory_limit, session_config
from trainer.run_settings import recorded_setting


def choose_placement(setup, position):
    """`setup` with the placement of variables that --variable_device=auto asks for.

    Args:
      setup: `Setup`.
      position: `Position` that the run goes on from.
    """
    if FLAGS.plan_only or setup.variable_device != 'auto':  # the plan runs no step
        return setup
    return setup._replace(variable_device=choose_variable_device(setup, position))


def choose_variable_device(setup, position):
    """Where the variables of the run in --train_dir are: as recorded there, else where steps are
    fastest. Prints the choice.

    Args:
      setup: `Setup`.
      position: `Position` that the run goes on from.

    Returns:
      A device as `VariablePlacement` takes it.
    """
    def build(candidate):
        job = _built(setup._replace(variable_device=candidate), position, with_evaluation=False)
        return Trial(job.train_op, [job.iterator.initializer], session_config(job.built))
    devices = towers.resolve_devices(FLAGS.devices or FLAGS.num_towers)
    with naming_failures():
        chosen, text = recorded_choice(train_dir(), devices, lambda: towers.choose_variable_device(
            build, towers.placement_candidates(devices)))
    print(text, flush=True)
    return chosen


def show_memory(setup):
    """Prints where the memory of a step goes, and draws it (--memory_plot)."""
    count_on_cpus()
    with naming_failures():
        towers.memory_report(_measured(setup), setup.batch_size, memory_limit(),
                             FLAGS.memory_plot or None, session_config, _say)


def choose_batch_size(setup):
    """The batch size for --batch_size=auto, an int: as recorded in --train_dir, else the largest
    one that fits into memory. Prints the choice."""
    count_on_cpus()
    parts = parts_of_batch(len(towers.resolve_devices(FLAGS.devices or FLAGS.num_towers)))
    recorded = recorded_setting(train_dir(), 'batch_size')
    if type(recorded) is int and 0 < recorded <= MOST_EXAMPLES and recorded % parts == 0:
        print('batch %d: as the run in %s was last started' % (recorded, train_dir()), flush=True)
        return recorded
    with naming_failures():
        return towers.fit_batch_size(_measured(setup), parts, memory_limit(), _say, session_config,
                                     setup.dataset.num_examples['train']).batch_size


def diagnose(setup):
    """Measures the pipeline, the towers, and both: a `diagnosis.Diagnosis` to be printed."""
    dataset, batch_size = setup.dataset, setup.batch_size

    def trial(batch_size=batch_size):
        job = _built(setup._replace(batch_size=batch_size), with_evaluation=False)
        return diagnosis.Trial(job.train_op, [job.iterator.initializer], session_config(job.built),
                               job.built)

    def batches():
        return dataset.train_batches(batch_size=batch_size, seed=FLAGS.seed,
                                     shift=FLAGS.augment_shift, remainder=FLAGS.remainder,
                                     **setup.model.image_format)

    def stages():
        return dataset.stages(batch_size, FLAGS.seed, remainder=FLAGS.remainder,
                              **setup.model.image_format)
    with naming_failures():
        return diagnosis.diagnose(
            trial, batches, FLAGS.devices or FLAGS.num_towers, batch_size,
            stages=stages if hasattr(dataset, 'stages') else None, seconds=FLAGS.diagnose_seconds,
            trial_alone=lambda: trial(_mean_batch_size(setup)),  # one batch stands for all of them
            say=_say)


def _say(line):
    print(line, flush=True)


def _mean_batch_size(setup):
    """Examples that a step has on average, rounded up to what divides among the towers.

    A step takes about a * examples + b, so that steps of the average size have the mean speed of
    short ones and full ones (--remainder=weight).
    """
    count = setup.dataset.num_examples['train']
    epochs = Epochs(count, setup.batch_size, FLAGS.remainder)
    if epochs.is_static:
        return setup.batch_size
    parts = parts_of_batch(len(
        towers.resolve_devices(FLAGS.devices or FLAGS.num_towers)))
    return min(setup.batch_size, -(-count // (epochs.steps(0, epochs.length) * parts)) * parts)


def _measured(setup):
    """The function of a batch size that `memory_report` and `fit_batch_size` build a step with."""
    def build(batch_size):
        job = _built(setup._replace(batch_size=batch_size))
        return job.built, [job.iterator.initializer]
    return build


def _built(setup, *arguments, **options):
    """As `build_job`, with the graph's random numbers as in a run."""
    tf.set_random_seed(FLAGS.seed)
    return build_job(setup, *arguments, **options)
