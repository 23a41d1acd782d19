"""The confusion matrix of a test set: which class was taken for which, and accuracies by class.

    counts[l, p]    examples of the label l that were predicted as p
    accuracy of l   counts[l, l] / sum over p of counts[l, p]

The accuracy of the test set is the sum of the diagonal over the sum of all counts.
"""

import typing

import numpy as np

from towers.errors import shown
from trainer.pictures import new_axes, write_picture, write_table

_MOST_CLASSES = 20  # with more classes the screen does not show the matrix
_MOST_MISTAKES = 10  # how many of the most frequent mistakes the screen shows
_MOST_PICTURED = 40  # with more classes the picture has no names and counts


class ConfusionMatrix:
    """Counts of examples by label and by predicted class; `print(matrix)` shows them.

    Attributes:
      counts: int64 array [classes, classes]: `counts[label, predicted]` examples.
    """

    def __init__(self, num_classes: int, names: typing.Optional[typing.Sequence[str]] = None):
        """
        Args:
          num_classes: the number of classes; labels are 0 … num_classes - 1.
          names: the names of the classes; None for their numbers.
        """
        self.counts = np.zeros([num_classes, num_classes], np.int64)
        self._names = [shown(str(name)) for name in (names or range(num_classes))]
        self._name_width = max(map(len, self._names))

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
        """For each class the share of its examples that were predicted as this class; NaN for a
        class without examples."""
        with np.errstate(invalid='ignore'):
            return np.diagonal(self.counts) / self.examples

    def __str__(self):
        """Accuracies by class, the matrix if there are few classes, and the frequent mistakes."""
        lines = self._lines_by_class()
        if len(self._names) <= _MOST_CLASSES:
            lines += self._lines_of_matrix()
        return '\n'.join(lines + self._lines_of_mistakes())

    def _lines_by_class(self) -> typing.List[str]:
        """A line for each class, with its accuracy; of many classes only for the least accurate."""
        classes = np.arange(len(self._names))
        title = 'accuracy by class'
        if len(self._names) > _MOST_CLASSES:
            classes = np.argsort(self.accuracies, kind='stable')[:_MOST_CLASSES]
            title = 'accuracy of the %d classes with the smallest' % _MOST_CLASSES
        lines = [title]
        for label in classes:
            name = self._names[label].ljust(self._name_width)
            lines.append('  %s  %.4f of %d' % (
                name, self.accuracies[label], self.examples[label]))
        return lines

    def _lines_of_matrix(self) -> typing.List[str]:
        """The matrix: a row for each label, a column for each predicted class."""
        numbers = [str(number) for number in range(len(self._names))]
        width = max(3, len(str(self.counts.max())), len(numbers[-1]))  # of a column, in characters
        heads = numbers
        if self._name_width <= width:  # all names fit
            heads = self._names
        head_cells = [' ' * self._name_width] + [head.rjust(width) for head in heads]
        lines = ['examples by label (row) and predicted class (column)',
                 '  ' + '  '.join(head_cells)]
        for name, row in zip(self._names, self.counts):
            cells = [str(count or '.').rjust(width) for count in row]  # a point for 0
            lines.append('  ' + '  '.join([name.ljust(self._name_width)] + cells))
        return lines

    def _lines_of_mistakes(self) -> typing.List[str]:
        """A line for each of the most frequent mistakes, below a title; [] without mistakes."""
        mistakes = self.counts - np.diag(np.diagonal(self.counts))  # without right predictions
        most_frequent = np.argsort(-mistakes, axis=None, kind='stable')[:_MOST_MISTAKES]
        lines = []
        for label, predicted in zip(*np.unravel_index(most_frequent, mistakes.shape)):
            count = mistakes[label, predicted]
            if count:  # with few mistakes there are zeros among the largest counts
                lines.append('  %s taken for %s: %d of %d' % (
                    self._names[label], self._names[predicted], count, self.examples[label]))
        if not lines:
            return []
        return ['most frequent mistakes'] + lines

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

    def _draw(self, path: str) -> None:
        """Writes a PNG with the share of each label's examples by predicted class."""
        axes = new_axes('test examples by label and predicted class', (7, 6))
        # At least 1: a label may have no examples; then its counts are 0, and its shares as well.
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
                is_dark = shares[label, predicted] > .5  # the cell, on which the number stands
                axes.text(predicted, label, self.counts[label, predicted], fontsize=7,
                          ha='center', va='center', color='white' if is_dark else 'black')
        write_picture(axes, path)
