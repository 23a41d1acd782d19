"""The confusion matrix of a test set: which class was taken for which, and accuracies by class.

    counts[l, p]    examples of the label l that were predicted as p
    accuracy of l   counts[l, l] / sum over p of counts[l, p]

The accuracy of the test set is the sum of the diagonal over the sum of all counts.
"""

import typing

import numpy as np

from towers.errors import shown
from trainer.pictures import new_axes, write_picture, write_table

_MOST_CLASSES = 20  # of which the screen has the whole matrix
_MOST_MISTAKES = 10  # lines of the most frequent ones
_MOST_PICTURED = 40  # classes whose names and counts are in the picture


class ConfusionMatrix:
    """Counts of examples by label and by predicted class; `print(matrix)` shows them.

    Attributes:
      counts: int64 array [classes, classes]: `counts[label, predicted]` examples.
    """

    def __init__(self, num_classes: int, names: typing.Optional[typing.Sequence[str]] = None):
        """
        Args:
          num_classes: how many there are; labels are 0 … num_classes - 1.
          names: of the classes; None: their numbers.
        """
        self.counts = np.zeros([num_classes, num_classes], np.int64)
        self._names = [shown(str(name)) for name in (names or range(num_classes))]

    def add(self, labels: np.ndarray, predicted: np.ndarray) -> None:
        """Counts the examples of a batch.

        Args:
          labels: int array [batch].
          predicted: int array [batch], the predicted classes.
        """
        np.add.at(self.counts, (labels, predicted), 1)

    @property
    def examples(self) -> np.ndarray:
        """The number of examples of each class."""
        return self.counts.sum(axis=1)

    @property
    def accuracies(self) -> np.ndarray:
        """The share of each class's examples that were predicted as such; NaN without examples."""
        with np.errstate(invalid='ignore'):
            return np.diagonal(self.counts) / self.examples

    def __str__(self):
        lines = self._lines_by_class()
        if len(self._names) <= _MOST_CLASSES:
            lines += self._lines_of_matrix()
        return '\n'.join(lines + self._lines_of_mistakes())

    def _lines_by_class(self):
        """A line a class, with its accuracy; of many, the classes with the smallest."""
        order = range(len(self._names))
        title = 'accuracy by class'
        if len(self._names) > _MOST_CLASSES:
            order = np.argsort(self.accuracies, kind='stable')[:_MOST_CLASSES]
            title = 'accuracy of the %d classes with the smallest' % _MOST_CLASSES
        width = max(len(name) for name in self._names)
        return [title] + ['  %s  %.4f of %d' % (
            self._names[number].ljust(width), self.accuracies[number], self.examples[number])
            for number in order]

    def _lines_of_matrix(self):
        """The matrix: a row a label, a column a predicted class."""
        width = max(3, len(str(self.counts.max())), len(str(len(self._names) - 1)))
        name_width = max(len(name) for name in self._names)
        heads = self._names
        if max(len(name) for name in heads) > width:  # long names: columns by number
            heads = [str(number) for number in range(len(self._names))]
        lines = ['examples by label (row) and predicted class (column)',
                 '  '.join([' ' * name_width] + [head.rjust(width) for head in heads])]
        for name, row in zip(self._names, self.counts):
            cells = [str(count).rjust(width) if count else '.'.rjust(width) for count in row]
            lines.append('  '.join([name.ljust(name_width)] + cells))
        return ['  ' + line if number else line for number, line in enumerate(lines)]

    def _lines_of_mistakes(self):
        """The most frequent mistakes, a line each; none without mistakes."""
        mistakes = self.counts - np.diag(np.diagonal(self.counts))
        order = np.argsort(-mistakes, axis=None, kind='stable')[:_MOST_MISTAKES]
        lines = []
        for label, predicted in zip(*np.unravel_index(order, mistakes.shape)):
            count = mistakes[label, predicted]
            if count:
                lines.append('  %s taken for %s: %d of %d' % (
                    self._names[label], self._names[predicted], count, self.examples[label]))
        return ['most frequent mistakes'] + lines if lines else []

    def write(self, path: str) -> None:
        """Writes the matrix: a table to a path that ends in `.csv`, else a picture.

        Raises:
          MissingPackageError: the picture needs matplotlib.
        """
        if path.endswith('.csv'):
            rows = [['label'] + self._names]
            for name, row in zip(self._names, self.counts):
                rows.append([name] + row.tolist())
            write_table(rows, path)
        else:
            self._draw(path)

    def _draw(self, path: str):
        """Draws the share of each label's examples by predicted class, as a PNG at a path."""
        axes = new_axes('test examples by label and predicted class', (7, 6))
        shares = self.counts / np.maximum(self.examples[:, None], 1)
        image = axes.imshow(shares, cmap='Blues', vmin=0, vmax=1)
        axes.figure.colorbar(image, label="share of the label's examples")
        axes.set_xlabel('predicted class')
        axes.set_ylabel('label')
        if len(self._names) <= _MOST_PICTURED:
            axes.set_xticks(range(len(self._names)))
            axes.set_xticklabels(self._names, rotation=90)
            axes.set_yticks(range(len(self._names)))
            axes.set_yticklabels(self._names)
            for label, predicted in zip(*np.nonzero(self.counts)):
                is_dark = shares[label, predicted] > .5
                axes.text(predicted, label, self.counts[label, predicted], fontsize=7,
                          ha='center', va='center', color='white' if is_dark else 'black')
        write_picture(axes, path)
