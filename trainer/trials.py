"""What train.py finds out by running steps that train nothing: memory and diagnosis."""

import tensorflow.compat.v1 as tf

import towers
from towers.memory.report import count_on_cpus
from trainer import diagnosis
from trainer.data import naming_failures
from trainer.flags import FLAGS, MOST_EXAMPLES, train_dir
from trainer.job import build_job, parts_of_batch
from trainer.resources import memory_limit, session_config
from trainer.run_settings import recorded_setting


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

    def train(is_held):
        job = _built(setup._replace(dataset=_OneBatch(dataset)) if is_held else setup,
                     with_evaluation=False)
        return diagnosis.steps_of(job, session_config(job.built))

    def batches():
        return dataset.train_batches(batch_size=batch_size, seed=FLAGS.seed,
                                     shift=FLAGS.augment_shift, remainder=FLAGS.remainder,
                                     **setup.model.image_format)

    def stages():
        return dataset.stages(batch_size, FLAGS.seed, remainder=FLAGS.remainder,
                              **setup.model.image_format)
    with naming_failures():
        return diagnosis.diagnose(
            train, batches, batch_size, stages if hasattr(dataset, 'stages') else None,
            seconds=FLAGS.diagnose_seconds, unit=setup.model.unit, say=_say)


def _say(line):
    print(line, flush=True)


class _OneBatch:
    """A data set whose training batches are all its first one, from memory."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def train_batches(self, **arguments):
        """As of the data set."""
        return self._dataset.train_batches(**arguments).take(1).cache().repeat()


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
