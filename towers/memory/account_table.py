"""What the memory of a step is for, as values and as a table. `account` finds it out.

Its test is `tests/memory/test_account.py`.
"""

import collections
import typing

from towers.placement.devices import is_gpu, short_name

# The uses of memory, in the order in which they are shown, with colours of Okabe and Ito and their
# tints, which the colour-blind can tell apart as neighbours.
KINDS = collections.OrderedDict([
    ('parameters', '#0072B2'),  # the model's variables, and their replicas
    ('slots', '#56B4E9'),  # the optimizer's variables, and the slots of replicas
    ('other variables', '#9ad0ee'),  # counters and the like
    ('initial values', '#cce5f5'),  # constants that the session keeps after the first update
    ('constants', '#dddddd'),  # of the graph
    ('input', '#000000'),  # the batch and its shards
    ('activations', '#E69F00'),  # results of the forward pass that the backward pass still needs
    ('forward', '#f5cf7a'),  # other results of the forward pass
    ('gradients', '#009E73'),  # of the parameters: the towers' and the combined ones
    ('backward', '#7fceb9'),  # other results of the backward pass
    ('updates', '#CC79A7'),  # new memory of variables whose old values are still being read
    ('scratch', '#D55E00'),  # memory that a kernel takes for itself while it runs
    ('copies', '#F0E442'),  # of tensors of another device
    ('allocator', '#999999')])  # handed out beyond what was asked for

_MOST_COLUMNS = 6  # of the table; the column of all devices together is one of them
_DEVICES_OF_MANY = 4  # devices with a column, where a column for each would be too many
_TENSORS_SHOWN = 8


class HeldTensor(typing.NamedTuple):
    """A tensor in memory at the worst moment.

    Attributes:
      name: the operation or the variable whose tensor it is.
      kind: one of the `KINDS`.
      bytes: its size.
      device: where it is.
    """
    name: str
    kind: str
    bytes: int
    device: str


class DeviceAccount(typing.NamedTuple):
    """The worst moment of a device.

    Attributes:
      device: its name; '' for all devices together.
      kinds: dict from `KINDS` to bytes at that moment.
      moment: name of the operation that begins then.
      tensors: all tensors in memory then, the largest first.
    """
    device: str
    kinds: typing.Dict[str, int]
    moment: str
    tensors: typing.List[HeldTensor]

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return sum(self.kinds.values())


class MemoryAccount(typing.NamedTuple):
    """Where the memory of a step goes; `print(account)` is a table.

    Attributes:
      batch_size: examples of a step, over all towers; None where it is not known.
      devices: list of `DeviceAccount`, one a device.
      together: `DeviceAccount` of all devices, at the moment at which the sum of their bytes is
        largest. All CPUs of a process share one memory, so that on CPUs this account counts.
      unknown: names of operations with an output whose size is not known before the operation runs;
        the size of the operation's largest input is counted instead.
    """
    batch_size: typing.Optional[int]
    devices: typing.List[DeviceAccount]
    together: DeviceAccount
    unknown: typing.List[str]

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of the fullest GPU; without GPUs, of all CPUs together."""
        return self.fullest().peak

    def fullest(self) -> DeviceAccount:
        """The `DeviceAccount` of the fullest of the `pools`."""
        return max(self.pools(), key=lambda account: account.peak)

    def pools(self) -> typing.List[DeviceAccount]:
        """List of `DeviceAccount`, one for each memory that may run out: the memory of each GPU;
        without GPUs, the one memory that all CPUs of the process share."""
        gpus = [account for account in self.devices if is_gpu(account.device)]
        return gpus or [self.together]

    def largest(self) -> str:
        """The three largest tensors of the fullest memory, as a text."""
        texts = ['%s, %.1f MB (%s)' % (tensor.name, tensor.bytes / 1e6, tensor.kind)
                 for tensor in self.fullest().tensors[:3]]
        return '; '.join(texts)

    def __str__(self):
        """The table of kinds, the worst moment, and the largest tensors then."""
        batch = '' if self.batch_size is None else ', batch %d' % self.batch_size
        lines = ['memory of a step%s, MB at the worst moment of each device' % batch]
        lines += self._rows_of_kinds()
        lines.append('  the worst moment: %s' % self.fullest().moment)
        lines.append('largest tensors then')
        for tensor in self.fullest().tensors[:_TENSORS_SHOWN]:
            lines.append('  %9.1f MB  %-12s %s' % (tensor.bytes / 1e6, tensor.kind, tensor.name))
        if self.unknown:
            lines.append('sizes not known before they run, counted as their largest input: %d, '
                         'such as %s' % (len(self.unknown), self.unknown[0]))
        if any(is_gpu(account.device) for account in self.devices):
            lines.append("not counted on GPUs: cuDNN's workspace, what the allocator keeps for "
                         "later, CUDA's own memory")
        return '\n'.join(lines)

    def _rows_of_kinds(self) -> typing.List[str]:
        """The lines of the table: a column for each device, a row for each kind of memory, and the
        peaks as the last row."""
        shown = self._devices_shown()
        columns = shown
        if len(self.devices) > 1:
            columns = shown + [self.together]
        rows = [_row('', map(_heading, columns))]
        for kind in KINDS:
            sizes = [column.kinds.get(kind, 0) for column in columns]
            if any(sizes):
                rows.append(_row(kind, map(_as_megabytes, sizes)))
        peaks = [column.peak for column in columns]
        rows.append(_row('peak', map(_as_megabytes, peaks)))
        num_left_out = len(self.devices) - len(shown)
        if num_left_out:
            rows.append('  and %d devices more' % num_left_out)
        return rows

    def _devices_shown(self) -> typing.List[DeviceAccount]:
        """List of the devices that have a column: all of up to five, the first four of more."""
        num_columns = len(self.devices) + 1  # the last column is for all devices together
        if num_columns <= _MOST_COLUMNS:
            return self.devices
        return self.devices[:_DEVICES_OF_MANY]


def _row(title: str, cells: typing.Iterable[str]) -> str:
    """A line of the table, with a title at its left."""
    return '  %-16s' % title + ''.join(cells)


def _heading(column: DeviceAccount) -> str:
    """The cell above a column of the table: the name of the device, `'together'` for all devices.
    Of a longer name, such as `'/gpu:0+/gpu:1'` for stages, the last 12 characters are shown."""
    name = short_name(column.device)[-12:]
    return '%13s' % (name or 'together')


def _as_megabytes(size: int) -> str:
    """A cell of the table: bytes as megabytes, `'         12.5'`."""
    return '%13.1f' % (size / 1e6)
