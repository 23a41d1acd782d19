"""Examples that cannot be used: named by file and place, replaced, counted, written down.

The pipeline does not look for them: a bad one ends the step that would read it, before anything of
it is trained on. Then the examples of that step are tried one by one, see `stream_probe`. What is
known to be bad is from its place on replaced by the next good example of the files, which depends
on nothing but the files, so that a batch is full, every other example keeps its place, and a run
that resumes goes on as if it had never stopped.

Nearly all damages are seen whatever part of an image is decoded, see `jpeg_end`. Of some in the
middle of a JPEG's data the decoder only complains where it comes to the end of the image, and many
it does not see at all. So what is known as bad is written down with its place in the stream, and a
run that resumes leaves it out from there on, if it is still bad.
"""

import collections
import contextlib
import json
import os
import sys

import tensorflow.compat.v1 as tf

from datasets.damages import counted, number_of
from datasets.errors import BadExampleError, DatasetError
from datasets.jpeg_end import is_cut_off
from datasets.preprocessing import central_window
from towers.errors import LogFileError, shown
from towers.safe_files import parsed, read_data, written_whole

Bad = collections.namedtuple('Bad', 'split number position text name count')
Bad.__new__.__defaults__ = ('', 1)
"""An example that cannot be used.

Fields:
  split: 'train' or 'test'.
  number: of the example; None for what is wrong with a whole file.
  position: place in the stream of training examples from which on it is left out: where the
    pipeline failed at it, in its own place or in that of a bad one; -1: everywhere.
  text: file, place, and what is wrong.
  name: of the example in the folder of the data, as long as its files are the same; '' if unknown.
  count: how many it counts as: of files that are missing, their number.
"""

Change = collections.namedtuple('Change', 'is_good text')
"""What has become of an example that was bad and is not the same bad example now.

Fields:
  is_good: whether it is good now; else its number is that of another one, or of none.
  text: a line.
"""

CUT_OFF = 'is a damaged JPEG: it ends before its end marker, as a file that was copied in part does'

MOST_PIXELS = 10 ** 8  # of a PNG: decoded 300 MB, for each processor at once

_JPEG, _PNG = b'\xff\xd8\xff', b'\x89PNG\r\n\x1a\n'
_FILE = 'skipped_examples.jsonl'
_FORM = {'split': str, 'number': (int, type(None)), 'position': int, 'text': str, 'name': str,
         'count': int}
_MOST_BYTES = 2 ** 28


class Skipped:
    """The examples that a run leaves out, at most so many; kept in a file of the run's folder.

    Attributes:
      most: how many may be left out.
      examples: list of `Bad`, in the order in which they were met.
    """

    def __init__(self, most=0):
        self.most = most
        self.examples = []
        self._path = None

    def numbers(self, split):
        """The set of the numbers of a split's bad examples."""
        return set(self.since(split))

    def since(self, split):
        """Dict from the numbers of a split's bad examples to their positions, see `Bad`."""
        return {bad.number: bad.position for bad in self.examples
                if bad.split == split and bad.number is not None}

    def add(self, bad, short=''):
        """Leaves one more out.

        Args:
          bad: `Bad`.
          short: its text for an error; '' for the same.

        Raises:
          BadExampleError: they are too many, or none may be left out.
        """
        if any((bad.split, bad.number, bad.text) == (each.split, each.number, each.text)
               for each in self.examples):
            return
        before = number_of(self.examples)
        if before + bad.count > self.most:
            raise BadExampleError('%s%s' % (
                (short or bad.text).rstrip('.'),
                '. --skip_bad=10 would leave out as many as 10 bad examples, and count them.'
                if not self.most else '. %s%d were left out already, and --skip_bad=%d allows no '
                'more: see --mode=check_data.' % (
                    'They count as %d, ' % bad.count if bad.count > 1 else '', before,
                    self.most)))
        self.examples.append(bad)
        self._write()

    @contextlib.contextmanager
    def forgetting(self):
        """A block of steps that train nothing: what is left out in it, any number where any may
        be, is not afterwards.

        How many such steps there are depends on the machine, and what a run leaves out may not.
        """
        kept = self.most, self.examples, self._path
        self.most, self.examples, self._path = (
            sys.maxsize if self.most else 0, list(self.examples), None)
        try:
            yield
        finally:
            self.most, self.examples, self._path = kept

    def resume(self, folder, place, look_again):
        """Takes up what the run in a folder left out before a place of its stream, if it is the
        same and still bad. From now on the list is kept in the folder, and is written at once: what
        is known by now belongs to it, and what an earlier start knew does not.

        What it left out later is found there again: until then it was read. What is wrong with
        files and the test set is looked for anew in any case.

        Args:
          folder: of the run.
          place: at which the run goes on.
          look_again: function from a `Bad` of the list to what has become of it: a `Bad`, with what
            is wrong now, where it is still bad; else a `Change`. It is called when those before it
            have been taken up.

        Returns:
          List of the `Change`s.

        Raises:
          BadExampleError: those that are still bad are too many, or none may be left out.
          DatasetError: the list is damaged.
          LogFileError: it cannot be written.
        """
        path = os.path.join(folder, _FILE)
        exists, changes = os.path.lexists(path), []
        for bad in self._read(path) if exists else []:
            if bad.split != 'train' or bad.number is None or bad.position >= place:
                continue
            bad = look_again(bad)
            if isinstance(bad, Change):
                changes.append(bad)
            elif self.most:
                self.add(bad)  # not written yet: an error leaves the list as it is
            else:
                raise BadExampleError(
                    '%s. The run in %s left it out, and may leave out none now: give --skip_bad '
                    'again, as in --skip_bad=10, or mend it.' % (bad.text.rstrip('.'), folder))
        self._path = path
        if exists or self.examples:
            self._write()
        return changes

    def describe(self):
        """Lines that count and list them; '' for none."""
        if not self.examples:
            return ''
        return '\n'.join(['skipped        %s' % counted(self.examples)]
                         + ['  %s' % bad.text for bad in self.examples])

    @staticmethod
    def _read(path):
        try:
            found = [Bad(**parsed(line, _FORM)) for line in (
                read_data(path, _MOST_BYTES) or b'').split(b'\n') if line.strip()]
            return [bad._replace(text=shown(bad.text)) for bad in found]
        except (OSError, ValueError, LogFileError) as error:
            raise DatasetError('%s, the list of what the run left out, cannot be read: %s. Remove '
                               'it: what is bad is found again where it is met.' % (
                                   path, error)) from None

    def _write(self):
        if self._path is None:
            return
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
        except OSError as error:
            raise LogFileError('The directory %s cannot be made: %s.' % (
                os.path.dirname(self._path), error.strerror or error)) from error
        with written_whole(self._path, advice='Make room or make the directory writable.') as lines:
            for bad in self.examples:
                lines.write(json.dumps(bad._asdict()) + '\n')


def lines_of_changes(changes):
    """Lines that count and list what a run that resumes found changed, a list of `Change`s."""
    lines = []
    for is_good, said in (
            (True, 'used again     %s that the run left out before: '),
            (False, 'forgotten      %s that the run left out before, since files came or went: '
                    'what is still bad is found again where it is met; ')):
        texts = ['  %s' % change.text for change in changes if change.is_good == is_good]
        if texts:
            lines.append(said % ('1 example' if len(texts) == 1 else '%d examples' % len(texts))
                         + 'it is not the run that it would be without a stop')
        lines += texts
    return lines


def wrong_bytes(encoded):
    """What is wrong with the bytes of an image by their beginning and end; '' for nothing.

    It takes a fifth of a microsecond. The decoders are no judges of it: that of PNGs takes a GIF of
    one picture as well, and that of a part of a JPEG does not come to its end.
    """
    if encoded.startswith(_JPEG):
        return CUT_OFF if is_cut_off(encoded) else ''
    if encoded.startswith(_PNG):
        width, height = (int.from_bytes(encoded[at:at + 4], 'big') for at in (16, 20))
        return '' if width * height <= MOST_PIXELS else (
            'is a PNG of %d x %d pixels, which would be decoded whole, and MOST_PIXELS of datasets/'
            'bad_examples.py is %d: make it smaller, or a JPEG, of which parts are decoded' % (
                width, height, MOST_PIXELS))
    return ('is neither a JPEG nor a PNG: it begins with %r' % encoded[:8] if encoded else
            'is empty')


class Prober:
    """Decodes single images, to tell what is wrong with them."""

    def __init__(self):
        self._graph = tf.Graph()
        with self._graph.as_default(), tf.device('/cpu:0'):
            self._encoded = tf.placeholder(tf.string, [])
            self._header = tf.image.extract_jpeg_shape(self._encoded)
            self._jpeg = tf.shape(tf.image.decode_jpeg(self._encoded))
            window = central_window(*tf.unstack(tf.cast(self._header[:2], tf.float32)))
            self._central = tf.image.decode_and_crop_jpeg(
                self._encoded, tf.cast(window, tf.int32), channels=3).op
            self._png = tf.shape(tf.image.decode_png(self._encoded))
        self._session = None

    def size(self, encoded, channels, convert, whole=True):
        """Height, width and channels of an image.

        Args:
          encoded: its bytes.
          channels: that it is to have.
          convert: whether it may have others.
          whole: decode all of it; False: of a JPEG the central part, as an evaluation does.

        Raises:
          DatasetError: it cannot be used; the text goes on after the image's name.
        """
        wrong = wrong_bytes(encoded)
        if wrong:
            raise DatasetError(wrong)
        jpeg = encoded.startswith(_JPEG)
        if self._session is None:
            self._session = tf.Session(graph=self._graph, config=tf.ConfigProto(
                device_count={'GPU': 0}))
        try:
            # The channels by the header: of CMYK the decoder makes another number.
            size = self._session.run(self._header if jpeg else self._png, {self._encoded: encoded})
            if jpeg:
                self._session.run(self._jpeg if whole else self._central, {self._encoded: encoded})
        except tf.errors.OpError as error:
            raise DatasetError('is a damaged %s: %s' % (
                'JPEG' if jpeg else 'PNG', short_reason(error.message)))
        if size[2] != channels and not convert:
            raise DatasetError('has %s, and %d are expected; --convert_colors takes it as it is '
                               'decoded' % (_channels_text(size[2], jpeg), channels))
        return tuple(int(each) for each in size)


def short_reason(message):
    """What an operation said: TF puts its traceback before it, and the operation's name after."""
    return message.split(' [[')[0].rstrip().split('\n')[-1].rstrip('.')[:120]


def _channels_text(channels, jpeg):
    if jpeg and channels == 4:
        return '4 channels (CMYK)'
    return '%d channel%s' % (channels, '' if channels == 1 else 's')
