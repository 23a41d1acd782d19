"""Made-up settings and results of the batch-scaling benchmark."""

from benchmarks.batch_scaling.arms import Settings, make_arms
from benchmarks.batch_scaling.results import Point, RunResult


def settings(**changes):
    values = dict(model='digits', dataset='digits', data_dir='', image_size=8, num_towers=4,
                  batch_size=25, learning_rate=0.001, optimizer='adam', reduction='mean',
                  warmup_epochs=[0.], batch_norm_decay=0.9, aux_loss_weight=None, examples=600,
                  evaluations=3, seeds=2)
    return Settings(**dict(values, **changes))


def result(name, seed, accuracies, losses, status='finished', reason=''):
    """A run of the arm `name` whose evaluations, every 200 examples, gave these."""
    arm, = make_arms(settings(), [name])
    points = [Point(200 * (number + 1), 0.5 * (number + 1), loss, accuracy)
              for number, (accuracy, loss) in enumerate(zip(accuracies, losses))]
    return RunResult(arm, seed, status, reason, points, 400.)
